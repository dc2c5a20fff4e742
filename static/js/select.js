// Multi-selection in [data-select]: checkboxes [data-select-row] with shift ranges, [data-select-all],
// the count in [data-select-count] (with the value "servers", also of how many servers), and [data-select-bar], which is visible only with a selection.
// When htmx replaces a [data-select] that has an id, the selection is restored: checkboxes in the new
// list are checked again, and the other values are added to its [data-select-elsewhere] from the
// template [data-select-elsewhere-row].
let lastClicked = null;

function rowsOf(scope) {
  return [...scope.querySelectorAll("[data-select-row]")];
}

// The values are names of tools, which start with the id of their server.
function describeServers(boxes) {
  const servers = new Set(boxes.filter((box) => box.checked).map((box) => box.value.split("__")[0]));
  return servers.size > 1 ? ` from ${servers.size} servers` : "";
}

function showSelection(scope) {
  const boxes = rowsOf(scope);
  const count = boxes.filter((box) => box.checked).length;
  for (const box of boxes) box.closest("tr, li")?.classList.toggle("picked", box.checked);
  for (const label of scope.querySelectorAll("[data-select-count]")) {
    const from = label.dataset.selectCount === "servers" ? describeServers(boxes) : "";
    label.textContent = `${count} selected${from}`;
  }
  for (const bar of scope.querySelectorAll("[data-select-bar]")) bar.hidden = count === 0;
  const all = scope.querySelector("[data-select-all]");
  if (!all) return;
  all.checked = count > 0 && count === boxes.length;
  all.indeterminate = count > 0 && count < boxes.length;
}

document.addEventListener("click", (event) => {
  const scope = event.target.closest("[data-select]");
  if (!scope) return;
  if (event.target.matches("[data-select-all]")) {
    for (const box of rowsOf(scope)) box.checked = event.target.checked;
  } else if (event.target.matches("[data-select-row]")) {
    const boxes = rowsOf(scope);
    const from = boxes.indexOf(lastClicked);
    const to = boxes.indexOf(event.target);
    if (event.shiftKey && from >= 0) {
      for (const box of boxes.slice(Math.min(from, to), Math.max(from, to) + 1)) box.checked = event.target.checked;
    }
    lastClicked = event.target;
  } else if (event.target.closest("[data-select-none]")) {
    for (const box of rowsOf(scope)) box.checked = false;
  } else return;
  showSelection(scope);
});

// Checked values of the [data-select] that htmx is replacing.
let selected = [];

document.addEventListener("htmx:beforeSwap", (event) => {
  const scope = event.detail.target;
  if (!scope.id || !scope.matches("[data-select]")) return;
  selected = rowsOf(scope).filter((box) => box.checked).map((box) => box.value);
});

function restoreSelection(scope) {
  const values = selected;
  selected = [];
  const boxes = new Map(rowsOf(scope).map((box) => [box.value, box]));
  const list = scope.querySelector("[data-select-elsewhere]");
  const row = scope.querySelector("[data-select-elsewhere-row]");
  for (const value of values) {
    if (boxes.has(value)) boxes.get(value).checked = true;
    else if (list && row) {
      const copy = row.content.cloneNode(true);
      copy.querySelector("input").value = value;
      copy.querySelector("span").textContent = value;
      list.append(copy);
    }
  }
}

document.addEventListener("htmx:afterSwap", (event) => {
  const scope = event.detail.target.id && document.getElementById(event.detail.target.id);
  if (scope && scope.matches("[data-select]")) restoreSelection(scope);
});

function showAll() {
  for (const scope of document.querySelectorAll("[data-select]")) showSelection(scope);
}

document.addEventListener("htmx:afterSettle", showAll);
addEventListener("pageshow", showAll);
