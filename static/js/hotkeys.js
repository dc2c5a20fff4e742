// The global keys. Off while typing, and everywhere when <html data-keys="off">.
//   [data-go="s"]       g then s follows this link          [data-search]   / focuses this field
//   [data-rows]         j and k move through its children   [data-undo]     u presses the newest,
//                                                                           a button or a form
//   [data-hotkey="a"]   a presses this; inside a row of [data-rows] only while the row has the focus
let waitingForGo = 0;

function typing(target) {
  return target.isContentEditable
    || target.matches("textarea, select, input:not([type=checkbox], [type=radio], [type=button], [type=submit])");
}

function currentRow() {
  return document.activeElement?.closest("[data-rows] > *");
}

function handleOf(row) {
  return row.querySelector("[data-open], th a") || row.querySelector("a, input, button");
}

function move(step) {
  const row = currentRow();
  const list = row ? row.parentElement : document.querySelector("[data-rows]");
  if (!list) return false;
  const rows = [...list.children].filter((one) => !one.hidden && handleOf(one));
  const next = row ? rows[rows.indexOf(row) + step] : rows[step > 0 ? 0 : rows.length - 1];
  if (next) {
    handleOf(next).focus();
    next.scrollIntoView({ block: "nearest" });
  }
  return true;
}

// What selects a row: its own box, or that of the same tool in the board's list. A box that acts at
// once, as that of a preload, selects nothing.
function selectorOf(row) {
  const same = row?.dataset.row && `[data-pick="${CSS.escape(row.dataset.row)}"] [data-select-row]`;
  return row?.querySelector("[data-select-row], .pick input[type=checkbox]") || (same && document.querySelector(same));
}

function press(element, shiftKey = false) {
  if (!element) return false;
  if (shiftKey) element.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true, shiftKey }));
  else element.click();
  return true;
}

function go(letter) {
  return press(document.querySelector(`[data-go="${CSS.escape(letter)}"]`));
}

function pressHotkey(key) {
  const selector = `[data-hotkey="${CSS.escape(key)}"]`;
  const inRow = currentRow()?.querySelector(selector);
  const onPage = [...document.querySelectorAll(selector)].find((one) => !one.closest("[data-rows]"));
  return press(inRow || onPage);
}

function openRowMenu() {
  const summary = currentRow()?.querySelector("details[data-menu] > summary");
  if (!summary) return false;
  summary.click();
  const first = summary.parentElement.open && summary.parentElement.querySelector(":scope > :not(summary) :is(a, button, input, select)");
  (first || summary).focus();
  return true;
}

function undo() {
  const offers = [...document.querySelectorAll("[data-undo]")].filter((one) => !one.closest(".still"));
  const newest = offers.findLast((one) => one.closest("#toasts")) || offers.at(-1);
  if (!newest?.matches("form")) return press(newest);
  newest.requestSubmit();
  return true;
}

const ACTS = {
  "?": () => press(document.querySelector('[data-dialog="keys"]')),
  "/": () => {
    const field = document.querySelector("[data-search]");
    field?.focus();
    field?.select();
    return Boolean(field);
  },
  j: () => move(1),
  k: () => move(-1),
  x: () => press(selectorOf(currentRow())),
  X: () => press(selectorOf(currentRow()), true),
  ".": openRowMenu,
  u: undo,
  Enter: () => {
    const row = currentRow();
    const inLink = document.activeElement?.matches("a, button, summary");
    return Boolean(row) && !inLink && press(row.querySelector("[data-open], th a"));
  },
};

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "Escape") {
    // Dialogs and menus close themselves; what is left is a field or a row.
    if (!document.querySelector("dialog[open]")) document.activeElement?.blur();
    return;
  }
  if (document.documentElement.dataset.keys === "off") return;
  if (typing(event.target) || document.querySelector("dialog[open]")) return;
  let done;
  if (Date.now() < waitingForGo) {
    waitingForGo = 0;
    done = go(event.key);
  } else if (event.key === "g" && !event.shiftKey) {
    waitingForGo = Date.now() + 1500;
    done = true;
  } else {
    done = (ACTS[event.key] && ACTS[event.key]()) || (event.key !== "Enter" && pressHotkey(event.key));
  }
  if (done) event.preventDefault();
});
