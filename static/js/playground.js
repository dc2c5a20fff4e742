// Keyboard navigation of the search playground: the arrow keys move from [data-search] into the
// results and through them.
function resultLinks() {
  return [...document.querySelectorAll("#found [data-rows] > * [data-open]")];
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  const field = document.querySelector("#ask [data-search]");
  const links = resultLinks();
  const index = links.indexOf(document.activeElement?.closest("#found [data-rows] > *")?.querySelector("[data-open]"));
  if (document.activeElement !== field && index < 0) return;
  const next = event.key === "ArrowDown" ? links[index + 1] : links[index - 1] || field;
  if (!next || next === document.activeElement) return;
  event.preventDefault();
  next.focus();
  next.scrollIntoView({ block: "nearest" });
});
