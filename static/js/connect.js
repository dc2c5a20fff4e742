// Check step of the import: the button says how many servers it connects.
//   [data-connect]         a checkbox that connects a server; "program" allows its command as well
//   [data-connect-all]     allows all commands; hidden without this script
//   [data-connect-button]  submits, and is disabled while nothing is selected
const button = document.querySelector("[data-connect-button]");
const all = document.querySelector("[data-connect-all]");
const boxes = [...document.querySelectorAll("[data-connect]")];
const programs = boxes.filter((box) => box.dataset.connect === "program");

function show() {
  const count = boxes.filter((box) => box.checked).length;
  if (button) {
    button.textContent = count === 1 ? "Connect 1 server" : `Connect ${count} servers`;
    button.disabled = count === 0;
  }
  const box = all?.querySelector("input");
  if (!box) return;
  const allowed = programs.filter((program) => program.checked).length;
  box.checked = allowed === programs.length;
  box.indeterminate = allowed > 0 && allowed < programs.length;
}

if (all) all.hidden = false;
document.addEventListener("change", (event) => {
  if (event.target.closest("[data-connect-all]")) {
    for (const program of programs) program.checked = event.target.checked;
  }
  show();
});
addEventListener("pageshow", show);
show();
