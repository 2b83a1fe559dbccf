// Draws the bytes that are alive during a training step, over the step, as a picture.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];
const BOX = { left: 74, top: 24, bottom: 250, margin: 10 };
const LINES = 5; // at most, across the picture

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

// Returns round numbers from 0 to below `most`: multiples of 1, 2 or 5 in its unit.
function listTicks(most) {
  const unit = 1024 ** Math.floor(Math.log2(most) / 10);
  const digit = 10 ** Math.floor(Math.log10(most / unit));
  const step = [0.2, 0.5, 1, 2, 5, 10].map((factor) => factor * digit * unit).find((size) => most / size <= LINES);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

// curves: [{ color, dashes, points: [[time in thousandths, bytes], ...] }]; limit: bytes that a step may take.
function drawTimeline(svg, curves, limit) {
  const width = svg.clientWidth;
  svg.setAttribute("viewBox", `0 0 ${width} ${BOX.bottom + 24}`);
  svg.replaceChildren();
  const most = Math.max(...curves.flatMap((curve) => curve.points.map((point) => point[1]))) * 1.05;
  const right = width - BOX.margin;
  const x = (time) => BOX.left + ((right - BOX.left) * time) / 1000;
  const y = (bytes) => BOX.bottom - ((BOX.bottom - BOX.top) * bytes) / most;
  for (const bytes of listTicks(most)) {
    addShape(svg, "line", { x1: BOX.left, x2: right, y1: y(bytes), y2: y(bytes), opacity: 0.35 });
    addShape(svg, "text", { x: BOX.left - 6, y: y(bytes) + 4, "text-anchor": "end" }, formatBytes(bytes));
  }
  for (const { color, points, dashes } of curves) {
    const path = points.map(([time, bytes], i) => `${i ? "L" : "M"}${x(time).toFixed(1)} ${y(bytes).toFixed(1)}`).join("");
    addShape(svg, "path", { d: path, style: `stroke: ${color}`, "stroke-dasharray": dashes ?? "none" });
  }
  if (limit <= most) {
    addShape(svg, "line", { class: "limit", x1: BOX.left, x2: right, y1: y(limit), y2: y(limit) });
    addShape(svg, "text", { x: right, y: y(limit) - 5, "text-anchor": "end" }, `the card: ${formatBytes(limit)}`);
  }
  addShape(svg, "text", { x: BOX.left, y: 14 }, "memory in use");
  addShape(svg, "text", { x: BOX.left, y: BOX.bottom + 18 }, "start of forward");
  addShape(svg, "text", { x: right, y: BOX.bottom + 18, "text-anchor": "end" }, "end of backward");
}
