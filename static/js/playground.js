// The search playground: the arrow keys go from [data-search] into the results and through them,
// and the address that acts come back to follows what is typed.
function results() {
  return [...document.querySelectorAll("#found [data-rows] > * [data-open]")];
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
  if (event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  const field = document.querySelector("#ask [data-search]");
  const links = results();
  const at = links.indexOf(document.activeElement?.closest("#found [data-rows] > *")?.querySelector("[data-open]"));
  if (document.activeElement !== field && at < 0) return;
  const next = event.key === "ArrowDown" ? links[at + 1] : links[at - 1] || field;
  if (!next || next === document.activeElement) return;
  event.preventDefault();
  next.focus();
  next.scrollIntoView({ block: "nearest" });
});
