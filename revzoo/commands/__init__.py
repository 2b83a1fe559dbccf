"""The commands of revzoo, each in the file of its name; they import what they need when they run."""
