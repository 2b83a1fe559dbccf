// "What fits my card?": bytes of a training step from counted lines, fixed + each * batch, of which the highest is the peak.
"use strict";

const SHARE = 0.9; // of a card's memory is used: the rest is for the driver, workspaces of kernels and fragments
const CARDS = [8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192]; // [GB]
const LARGEST_BATCH = 2 ** 20;
const CURVES = { stored: "#8a6d3b", "checkpointed twin": "#7b8794", inverted: "#3f51b5", planned: "#1b7f3b" };

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
  <div class="scroll"><table><thead><tr><th>step</th><th>peak</th><th>fits</th><th>largest batch</th><th>work</th></tr></thead>
  <tbody></tbody></table></div>
  <svg class="timeline" viewBox="0 0 700 290" role="img" aria-label="Bytes alive during a training step"></svg>`;
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
  const methods = card.methods.map((method) => ({
    ...method, optimizers: method.name === "twin" ? card.twin_optimizers : card.optimizers }));
  const find = (name) => methods.find((method) => method.name === name);
  const own = methods.filter((method) => method.name !== "twin");
  const peak = (method) => countPeak(method, setting);
  const fitting = own.filter((method) => peak(method) <= setting.limit);
  const planned = fitting.length
    ? fitting.reduce((a, b) => (b.flops < a.flops ? b : a))
    : own.reduce((a, b) => (peak(b) < peak(a) ? b : a));
  return { stored: find("store"), "checkpointed twin": find("twin"), inverted: find("invert"), planned };
}

function readSetting() {
  const { dtype, optimizer, batch, card } = form.elements;
  return { dtype: dtype.value, optimizer: optimizer.value, batch: Math.max(1, Math.floor(batch.value) || 1),
    limit: card.value * 1e9 * SHARE };
}

function describeRow(name, method, setting, stored) {
  if (!method) return `<tr><td>${name}</td><td colspan="4">none is counted for this model</td></tr>`;
  const peak = countPeak(method, setting);
  const doesFit = peak <= setting.limit;
  const modes = name === "planned" ? Object.entries(method.modes).map(([mode, units]) => `${units} ${mode}`).join(", ") : "";
  const best = name === "planned"
    ? Math.max(...stored.card.methods.filter((m) => m.name !== "twin").map((m) =>
      findLargestBatch({ ...m, optimizers: stored.card.optimizers }, setting)))
    : findLargestBatch(method, setting);
  return `<tr><td>${name}${modes && `<br><small>${modes}</small>`}</td><td>${formatBytes(peak)}</td>
    <td class="${doesFit ? "fits" : "exceeds"}">${doesFit ? "yes" : "no"}</td><td>${best.toLocaleString("en")}</td>
    <td>${(method.flops / stored.method.flops).toFixed(2)}</td></tr>`;
}

function update() {
  const name = form.elements.model.value;
  const [{ card, input, parameters }, setting] = [ZOO[name], readSetting()];
  const methods = chooseMethods(card, setting);
  const stored = { method: methods.stored, card };
  fits.querySelector("tbody").innerHTML =
    Object.entries(methods).map(([label, method]) => describeRow(label, method, setting, stored)).join("");
  fits.querySelector(".summary").textContent =
    `${name}: ${parameters.toLocaleString("en")} parameters, input ${input}. ` +
    `Of ${form.elements.card.value} GB, ${formatBytes(setting.limit)} may be taken.`;
  const curves = Object.entries(methods).filter(([, method]) => method).map(([label, method]) => {
    const state = method.optimizers[setting.optimizer][0];
    const lines = method[setting.dtype];
    const points = listBytes(lines, setting.batch).map((bytes, i) => [lines.at[i], bytes + state]);
    return { label, color: CURVES[label], points, dashed: label === "planned" };
  });
  drawTimeline(fits.querySelector("svg"), curves, setting.limit);
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
}

// The setting stands in the address, so that it can be sent to somebody, or linked to.
function begin() {
  const [first] = Object.values(ZOO);
  form.elements.model.append(...Object.keys(ZOO).map((name) => new Option(name)));
  form.elements.optimizer.append(...Object.keys(first.card.optimizers).map((name) => new Option(name)));
  form.elements.card.append(...CARDS.map((size) => new Option(`${size} GB`, size)));
  form.elements.optimizer.value = "AdamW";
  form.elements.card.value = "24";
  if ("rev_vit_b" in ZOO) form.elements.model.value = "rev_vit_b";
  for (const [key, value] of new URLSearchParams(location.hash.slice(1)))
    if (form.elements[key]) form.elements[key].value = value;
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  update();
}

begin();
