"""The one palette of all figures."""

INK, PALE, FAINT, GRID = "#222222", "#8a8a8a", "#b0b0b0", "#e3e3e3"  # text; secondary text; ticks and spines; grid lines
BLUE, ORANGE, RED = "#2f6db3", "#d9822b", "#c8452b"
LIGHT_BLUE, LIGHT_ORANGE, LIGHT_GREY, GREY, CREAM = "#cfdfee", "#f5d9ad", "#ececec", "#c3c8ce", "#f7f4ec"  # areas
MODE_COLORS = {"store": "#4d4d4d", "selective": "#8fb56a", "recompute": "#e8a33d", "invert": "#2f7fc1"}
