// "What fits my card?": bytes of a training step from counted lines, fixed + each * batch, of which the highest is the peak. Of
// steps in tiles they are fixed + each * batch + tile * examples of a tile.
"use strict";

const SHARE = 0.9; // of a card's memory is used: the rest is for the driver, workspaces of kernels and fragments
const CARDS = { // [GB]
  8: "RTX 3070, 4060", 12: "RTX 3060, 4070", 16: "T4, RTX 4080", 24: "RTX 3090, 4090, L4, A10", 32: "RTX 5090, V100", 40: "A100",
  48: "A6000, L40S", 80: "A100, H100", 96: "RTX PRO 6000", 141: "H200", 192: "B200, MI300X",
};
const TILES = 8;
const LARGEST_BATCH = 2 ** 20;
const STEPS = {
  stored: { name: "store", color: "var(--stored)",
    title: "Every activation is kept until backward, as PyTorch does by itself: the most memory and the least work" },
  checkpointed: { name: "checkpointed", color: "var(--twin)",
    title: "Its library's gradient checkpointing, or that of every block: what can be had without revzoo" },
  "checkpointed twin": { name: "twin", color: "var(--twin)",
    title: "The ordinary network of about this size with its library's checkpoint at every block: what can be had without revzoo" },
  inverted: { name: "invert", color: "var(--inverted)",
    title: "Reversible steps keep nothing: backward computes their inputs again from their outputs. Stem, transitions and head store" },
  reversible: { name: "reversible", color: "var(--inverted)",
    title: "revzoo.reversible_: blocks are reversible steps that keep 8 bits of every element; the function changes a little" },
  "random signs": { name: "random signs", color: "var(--signs)",
    title: "revzoo.reversible_ that keeps one bit of every element, of a random sign, which is noise in training alone" },
};
STEPS["random signs, 8 tiles"] = { name: "random signs, 8 tiles", color: "var(--signs)", dashes: "12 3",
  title: "As random signs, every step in eight pieces, of which backward holds one: of examples, or in an MLP of tokens" };
for (const label of ["checkpointed", "checkpointed twin", "inverted", "random signs", "random signs, 8 tiles"]) {
  const { name, color } = STEPS[label];
  const title = `As ${label}, with revzoo.chunk_loss_: head and loss a few hundred tokens at a time`;
  STEPS[`${label}, chunked loss`] = { name: `${name}, chunked loss`, color, dashes: "2 4", title };
}
STEPS.planned = { color: "var(--planned)", dashes: "7 5",
  title: "revzoo.plan: of the plans counted for this network, the one with the least work that fits" };
const HEADS = {
  "training step": "What is kept for backward", peak: "The most memory in use at once, all in all", fits: "Whether the peak fits the card",
  "largest batch": "That fits the card. For planned: with the plan that takes the least", work: "FLOPs of the step over those of storing",
};

const fits = document.getElementById("fits");
fits.innerHTML = `
  <form class="controls">
    <label>model <select name="model"></select></label>
    <label>batch <input name="batch" type="number" min="1" max="1048576" value="32" required></label>
    <label>dtype <select name="dtype"><option>float32</option><option value="bfloat16">bfloat16 autocast</option></select></label>
    <label>optimizer <select name="optimizer"></select></label>
    <label>card <select name="card"></select></label>
  </form>
  <p class="answer" aria-live="polite"></p>
  <div class="scroll"><table><thead><tr></tr></thead><tbody></tbody></table></div>
  <p class="summary"></p>
  <svg class="timeline" role="img" aria-label="Memory in use during a training step"></svg>
  <p class="uncounted"></p>`;
const form = fits.querySelector("form");

const listBytes = (lines, batch) => lines.fixed.map(
  (fixed, i) => fixed + lines.each[i] * batch + (lines.tile ? lines.tile[i] * Math.ceil(batch / TILES) : 0));

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
    const optimizers = method.name.startsWith("twin") ? card.twin_optimizers : card.optimizers;
    const measured = { ...method, optimizers };
    return { ...measured, peak: countPeak(measured, setting), largest: findLargestBatch(measured, setting) };
  });
  const plans = methods.filter((method) => /^(store|invert|plan \d)$/.test(method.name));
  const fitting = plans.filter((method) => method.peak <= setting.limit);
  const planned = fitting.length
    ? fitting.reduce((a, b) => (b.flops < a.flops ? b : a))
    : plans.reduce((a, b) => (b.peak < a.peak ? b : a));
  const named = Object.entries(STEPS).map(([label, { name }]) => [label, methods.find((method) => method.name === name)]);
  const chosen = { ...Object.fromEntries(named), planned: { ...planned, largest: Math.max(...plans.map((plan) => plan.largest)) } };
  return Object.fromEntries(Object.entries(chosen).filter(([, method]) => method));
}

// Returns the sentence in which a "no" becomes a "yes".
function describeAnswer(name, methods, { batch, limit }) {
  const verdict = (fits, text) => `<b class="${fits ? "fits" : "exceeds"}">${text}</b>`;
  const { stored, ...others } = methods;
  const takes = `${name} at batch ${batch.toLocaleString("en")} takes ${formatBytes(stored.peak)} stored: `;
  const card = `${form.elements.card.value} GB`;
  if (stored.peak <= limit) return `${takes}${verdict(true, `it fits ${card}`)}, up to batch ${stored.largest.toLocaleString("en")};
    planned up to ${methods.planned.largest.toLocaleString("en")}.`;
  const fitting = Object.entries(others).filter(([, method]) => method.peak <= limit);
  const no = `${takes}${verdict(false, `it does not fit ${card}`)}`;
  if (fitting.length) {
    const [label, { flops }] = fitting.reduce((a, b) => (b[1].flops < a[1].flops ? b : a));
    return `${no}; ${verdict(true, `${label} it does`)}, at ${(flops / stored.flops).toFixed(2)} of the work.`;
  }
  const [label, { largest }] = Object.entries(methods).reduce((a, b) => (b[1].largest > a[1].largest ? b : a));
  return largest ? `${no} in any way; ${verdict(true, `${label} batch ${largest.toLocaleString("en")} would`)}.`
    : `${no} in any way: take a larger card, adapters, or an optimizer of less state.`;
}

function readSetting() {
  const { dtype, optimizer, batch, card } = form.elements;
  const only = ZOO[form.elements.model.value].dtype; // of the weights, where no other is counted
  dtype.disabled = Boolean(only);
  return { dtype: only ?? dtype.value, optimizer: optimizer.value, batch: Math.max(1, Math.floor(batch.value) || 1),
    limit: card.value * 1e9 * SHARE };
}

function describeModes({ name, modes }) {
  if (name === "store") return "everything stored";
  if (!Object.keys(modes).length) return "some results made again";
  return Object.entries(modes).map(([mode, units]) => `${units} ${mode}`).join(", ");
}

function describeRow(label, method, { limit }, stored) {
  const { color, title } = STEPS[label];
  const head = `<td title="${title}"><i class="swatch" style="background: ${color}"></i>${label}`;
  const doesFit = method.peak <= limit;
  return `<tr>${head}${label === "planned" ? `<br><small>${describeModes(method)}</small>` : ""}</td><td>${formatBytes(method.peak)}</td>
    <td class="${doesFit ? "fits" : "exceeds"}">${doesFit ? "yes" : "no"}</td><td>${method.largest.toLocaleString("en")}</td>
    <td>${(method.flops / stored.flops).toFixed(2)}</td></tr>`;
}

function describeModel(name, { optimizer, limit }) {
  const { card, input, parameters, dtype } = ZOO[name];
  const [state] = card.optimizers[optimizer];
  const taken = `Weights in ${dtype ?? "float32"} take ${formatBytes((dtype ? 2 : 4) * parameters)}`;
  return `${name}: ${parameters.toLocaleString("en")} parameters, input ${input}. ${taken}, gradients at the end of backward as ` +
    `much again, the state of ${optimizer} ${formatBytes(state)}, whatever the batch. A step may take ` +
    `${formatBytes(limit)}: 90 % of ${form.elements.card.value} GB. The rest is left to the driver, kernels and fragments.`;
}

function update() {
  const answer = fits.querySelector(".answer");
  if (!form.checkValidity()) {
    answer.textContent = "A batch is a whole number from 1 to 1,048,576.";
    return;
  }
  const [name, setting] = [form.elements.model.value, readSetting()];
  const methods = chooseMethods(ZOO[name].card, setting);
  answer.innerHTML = describeAnswer(name, methods, setting);
  fits.querySelector("tbody").innerHTML =
    Object.entries(methods).map(([label, method]) => describeRow(label, method, setting, methods.stored)).join("");
  fits.querySelector(".summary").textContent = describeModel(name, setting);
  const curves = Object.entries(methods).map(([label, method]) => {
    const state = method.optimizers[setting.optimizer][0];
    const lines = method[setting.dtype];
    const points = listBytes(lines, setting.batch).map((bytes, i) => [lines.at[i], bytes + state]);
    return { ...STEPS[label], points };
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
  const zoo = Object.keys(ZOO).filter((name) => !ORDINARY.includes(name));
  for (const [label, names] of [["well-known networks", ORDINARY], ["the zoo", zoo]]) {
    const group = document.createElement("optgroup");
    group.label = label;
    group.append(...names.map((name) => new Option(name)));
    form.elements.model.append(group);
  }
  form.elements.optimizer.append(...Object.keys(first.card.optimizers).map((name) => new Option(name)));
  form.elements.card.append(...Object.entries(CARDS).map(([size, names]) => new Option(`${size} GB: ${names}`, size)));
  form.elements.optimizer.value = "AdamW";
  form.elements.card.value = "24";
  form.elements.model.value = ORDINARY[0];
  form.elements.batch.value = "256"; // what does not fit as it is
  if (UNCOUNTED.length) fits.querySelector(".uncounted").textContent = `Not counted: ${UNCOUNTED.join(", ")}.`;
  readAddress();
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("resize", update);
  addEventListener("hashchange", () => { readAddress(); update(); });
  update();
}

begin();
