// details[data-menu]: one open at a time, closed by Esc and by a click elsewhere.
function closeMenus(except) {
  for (const menu of document.querySelectorAll("details[data-menu][open]")) {
    if (menu !== except) menu.open = false;
  }
}

document.addEventListener("click", (event) => {
  const inside = event.target.closest("details[data-menu]");
  const chosen = inside && event.target.closest("button, a");
  closeMenus(chosen ? null : inside);
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  const menu = document.querySelector("details[data-menu][open]");
  if (!menu) return;
  menu.open = false;
  menu.querySelector("summary").focus();
  event.stopPropagation();
}, true);
