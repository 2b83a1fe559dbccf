// Sorts and filters the table of the zoo.
"use strict";

const table = document.getElementById("zoo");
const form = document.getElementById("filter");
const rows = [...table.tBodies[0].rows];
const COLUMNS = { family: 1, parameters: 3, inverted: 6, weights: 8 };

const valueOf = (row, column) => {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
};

function sortBy(column) {
  const head = table.tHead.rows[0].cells[column];
  const order = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
  for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  rows.sort((a, b) => {
    const [x, y] = [valueOf(a, column), valueOf(b, column)];
    return sign * (typeof x === "number" ? x - y : x.localeCompare(y));
  });
  table.tBodies[0].append(...rows);
}

function filter() {
  const { name, family, parameters, memory, weights } = form.elements;
  const isShown = (row) =>
    row.cells[0].textContent.includes(name.value.trim().toLowerCase()) &&
    (!family.value || valueOf(row, COLUMNS.family) === family.value) &&
    (!parameters.value || valueOf(row, COLUMNS.parameters) <= parameters.value * 1e6) &&
    (!memory.value || valueOf(row, COLUMNS.inverted) <= memory.value * 2 ** 30) &&
    (!weights.checked || valueOf(row, COLUMNS.weights) !== "");
  for (const row of rows) row.hidden = !isShown(row);
  form.querySelector("output").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} models`;
}

[...table.tHead.rows[0].cells].forEach((cell, column) => cell.addEventListener("click", () => sortBy(column)));
form.addEventListener("input", filter);
form.addEventListener("submit", (event) => event.preventDefault());
filter();
