// [data-copy]: copies its value or, when empty, the [data-copy-text] of the same figure.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = button.closest("figure")?.querySelector("[data-copy-text]");
  const word = button.querySelector("[data-copy-word]");
  const before = word?.dataset.copyWord || "Copy";
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(button.dataset.copy || source?.textContent || "");
  } catch {
    // Without a secure context there is no clipboard: select the text for the person instead.
    said = source ? "Press Ctrl C" : "Not allowed here";
    if (source) getSelection().selectAllChildren(source);
  }
  if (!word) return;
  word.textContent = said;
  const live = document.getElementById("live");
  if (live) live.textContent = said;
  setTimeout(() => { word.textContent = before; }, 2000);
});
