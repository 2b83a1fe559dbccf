// Draws the bytes that are alive during a training step, over the step, as a picture.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const BOX = { left: 70, right: 690, top: 24, bottom: 250 };
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function formatBytes(bytes) {
  const power = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), UNITS.length - 1);
  return `${(bytes / 2 ** (10 * power)).toFixed(power ? 1 : 0)} ${UNITS[power]}`;
}

function addShape(parent, name, attributes, text = "") {
  const shape = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) shape.setAttribute(key, value);
  shape.textContent = text;
  parent.append(shape);
}

// curves: [{ label, color, dashed, points: [[time in thousandths, bytes], ...] }]; limit: bytes of the card.
function drawTimeline(svg, curves, limit) {
  svg.replaceChildren();
  const most = Math.max(...curves.flatMap((curve) => curve.points.map((point) => point[1]))) * 1.05;
  const x = (time) => BOX.left + ((BOX.right - BOX.left) * time) / 1000;
  const y = (bytes) => BOX.bottom - ((BOX.bottom - BOX.top) * bytes) / most;
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    addShape(svg, "line", { x1: BOX.left, x2: BOX.right, y1: y(share * most), y2: y(share * most), opacity: 0.35 });
    addShape(svg, "text", { x: BOX.left - 6, y: y(share * most) + 4, "text-anchor": "end" }, formatBytes(share * most));
  }
  for (const { color, points, dashed } of curves) {
    const path = points.map(([time, bytes], i) => `${i ? "L" : "M"}${x(time).toFixed(1)} ${y(bytes).toFixed(1)}`).join("");
    addShape(svg, "path", { d: path, stroke: color, "stroke-dasharray": dashed ? "7 5" : "none" });
  }
  if (limit <= most) {
    addShape(svg, "line", { class: "limit", x1: BOX.left, x2: BOX.right, y1: y(limit), y2: y(limit) });
    addShape(svg, "text", { x: BOX.right, y: y(limit) - 5, "text-anchor": "end" }, `the card: ${formatBytes(limit)}`);
  }
  curves.forEach(({ label, color }, i) => {
    addShape(svg, "line", { x1: BOX.left + 155 * i, x2: BOX.left + 155 * i + 18, y1: 278, y2: 278, style: `stroke:${color};stroke-width:3` });
    addShape(svg, "text", { x: BOX.left + 155 * i + 24, y: 282 }, label);
  });
  addShape(svg, "text", { x: BOX.left, y: 14 }, "bytes alive, from the start of forward to the end of backward");
}
