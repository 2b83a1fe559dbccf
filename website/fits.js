// "What fits my card?": bytes of a training step from counted lines, fixed + each * batch, of which the highest is the peak.
"use strict";

const SHARE = 0.9; // of a card's memory is used: the rest is for the driver, workspaces of kernels and fragments
const CARDS = { // [GB]
  8: "RTX 3070, 4060", 12: "RTX 3060, 4070", 16: "T4, RTX 4080", 24: "RTX 3090, 4090, L4, A10", 32: "RTX 5090, V100", 40: "A100",
  48: "A6000, L40S", 80: "A100, H100", 96: "RTX PRO 6000", 141: "H200", 192: "B200, MI300X",
};
const LARGEST_BATCH = 2 ** 20;
const STEPS = {
  stored: { name: "store", color: "var(--stored)",
    title: "Every activation is kept until backward, as PyTorch does by itself: the most memory and the least work" },
  "checkpointed twin": { name: "twin", color: "var(--twin)",
    title: "The ordinary network of about this size with its library's checkpoint at every block: what can be had without revzoo" },
  inverted: { name: "invert", color: "var(--inverted)",
    title: "Reversible steps keep nothing: backward computes their inputs again from their outputs. Stem, transitions and head store" },
  planned: { color: "var(--planned)",
    title: "A mode for each step: of the plans counted for this model, the one with the least work that fits" },
};
const HEADS = {
  "training step": "What is kept for backward", peak: "The most memory in use at once, all in all", fits: "Whether the peak fits the card",
  "largest batch": "That fits the card. For planned: with the plan that takes the least", work: "FLOPs of the step over those of storing",
};

const fits = document.getElementById("fits");
fits.innerHTML = `
  <form class="controls">
    <label>model <select name="model"></select></label>
    <label>batch <input name="batch" type="number" min="1" value="32"></label>
    <label>dtype <select name="dtype"><option>float32</option><option value="bfloat16">bfloat16 autocast</option></select></label>
    <label>optimizer <select name="optimizer"></select></label>
    <label>card <select name="card"></select></label>
  </form>
  <p class="summary" aria-live="polite"></p>
  <div class="scroll"><table><thead><tr></tr></thead><tbody></tbody></table></div>
  <svg class="timeline" role="img" aria-label="Memory in use during a training step"></svg>
  <p class="uncounted"></p>`;
const form = fits.querySelector("form");

const listBytes = (lines, batch) => lines.fixed.map((fixed, i) => fixed + lines.each[i] * batch);

// The peak is in forward and backward, or at the optimizer's update after it.
function countPeak(method, { dtype, optimizer, batch }) {
  const bytes = listBytes(method[dtype], batch);
  const [state, update] = method.optimizers[optimizer];
  return Math.max(...bytes, bytes.at(-1) + update) + state;
}

function findLargestBatch(method, setting) {
  let batch = 0;
  for (let step = LARGEST_BATCH; step >= 1; step /= 2)
    if (countPeak(method, { ...setting, batch: batch + step }) <= setting.limit) batch += step;
  return batch;
}

// Returns the methods by their names on the page. Planned is the one with the least work that fits, or else the smallest.
function chooseMethods(card, setting) {
  const methods = card.methods.map((method) => {
    const optimizers = method.name === "twin" ? card.twin_optimizers : card.optimizers;
    const measured = { ...method, optimizers };
    return { ...measured, peak: countPeak(measured, setting), largest: findLargestBatch(measured, setting) };
  });
  const own = methods.filter((method) => method.name !== "twin");
  const fitting = own.filter((method) => method.peak <= setting.limit);
  const planned = fitting.length
    ? fitting.reduce((a, b) => (b.flops < a.flops ? b : a))
    : own.reduce((a, b) => (b.peak < a.peak ? b : a));
  const named = Object.entries(STEPS).map(([label, { name }]) => [label, methods.find((method) => method.name === name)]);
  return { ...Object.fromEntries(named), planned: { ...planned, largest: Math.max(...own.map((method) => method.largest)) } };
}

function readSetting() {
  const { dtype, optimizer, batch, card } = form.elements;
  return { dtype: dtype.value, optimizer: optimizer.value, batch: Math.max(1, Math.floor(batch.value) || 1),
    limit: card.value * 1e9 * SHARE };
}

function describeModes({ name, modes }) {
  if (name === "store") return "everything stored";
  return Object.entries(modes).map(([mode, units]) => `${units} ${mode}`).join(", ");
}

function describeRow(label, method, { limit }, stored) {
  const { color, title } = STEPS[label];
  const head = `<td title="${title}"><i class="swatch" style="background: ${color}"></i>${label}`;
  if (!method) return `<tr>${head}</td><td colspan="4">no twin with checkpoints to compare with</td></tr>`;
  const doesFit = method.peak <= limit;
  return `<tr>${head}${label === "planned" ? `<br><small>${describeModes(method)}</small>` : ""}</td><td>${formatBytes(method.peak)}</td>
    <td class="${doesFit ? "fits" : "exceeds"}">${doesFit ? "yes" : "no"}</td><td>${method.largest.toLocaleString("en")}</td>
    <td>${(method.flops / stored.flops).toFixed(2)}</td></tr>`;
}

function describeModel(name, { optimizer, limit }) {
  const { card, input, parameters } = ZOO[name];
  const weights = formatBytes(4 * parameters);
  const [state] = card.optimizers[optimizer];
  return `${name}: ${parameters.toLocaleString("en")} parameters, input ${input}. Weights take ${weights}, gradients at the end of ` +
    `backward as much again, the state of ${optimizer} ${formatBytes(state)}, whatever the batch. A step may take ` +
    `${formatBytes(limit)}: 90 % of ${form.elements.card.value} GB. The rest is left to the driver, kernels and fragments.`;
}

function update() {
  const [name, setting] = [form.elements.model.value, readSetting()];
  const methods = chooseMethods(ZOO[name].card, setting);
  fits.querySelector("tbody").innerHTML =
    Object.entries(methods).map(([label, method]) => describeRow(label, method, setting, methods.stored)).join("");
  fits.querySelector(".summary").textContent = describeModel(name, setting);
  const curves = Object.entries(methods).filter(([, method]) => method).map(([label, method]) => {
    const state = method.optimizers[setting.optimizer][0];
    const lines = method[setting.dtype];
    const points = listBytes(lines, setting.batch).map((bytes, i) => [lines.at[i], bytes + state]);
    return { color: STEPS[label].color, points, dashed: label === "planned" };
  });
  drawTimeline(fits.querySelector("svg"), curves, setting.limit);
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
}

// The setting stands in the address, so that it can be sent to somebody, or linked to.
function readAddress() {
  for (const [key, value] of [location.search, location.hash].flatMap((part) => [...new URLSearchParams(part.slice(1))])) {
    const field = form.elements[key];
    if (field && (!field.options || [...field.options].some((option) => option.value === value))) field.value = value;
  }
}

function begin() {
  const [first] = Object.values(ZOO);
  fits.querySelector("thead tr").innerHTML =
    Object.entries(HEADS).map(([head, title]) => `<th title="${title}">${head}</th>`).join("");
  form.elements.model.append(...Object.keys(ZOO).map((name) => new Option(name)));
  form.elements.optimizer.append(...Object.keys(first.card.optimizers).map((name) => new Option(name)));
  form.elements.card.append(...Object.entries(CARDS).map(([size, names]) => new Option(`${size} GB: ${names}`, size)));
  form.elements.optimizer.value = "AdamW";
  form.elements.card.value = "24";
  if ("rev_vit_b" in ZOO) form.elements.model.value = "rev_vit_b";
  if (UNCOUNTED.length) fits.querySelector(".uncounted").textContent = `Not counted: ${UNCOUNTED.join(", ")}.`;
  readAddress();
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("resize", update);
  addEventListener("hashchange", () => { readAddress(); update(); });
  update();
}

begin();
