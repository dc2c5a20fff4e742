// [data-copy]: copies its value or, if empty, the [data-copy-text] of the same figure.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = button.closest("figure")?.querySelector("[data-copy-text]");
  const label = button.querySelector("[data-copy-word]");
  const defaultText = label?.dataset.copyWord || "Copy";
  let result = "Copied";
  try {
    await navigator.clipboard.writeText(button.dataset.copy || source?.textContent || "");
  } catch {
    // The clipboard requires a secure context: select the text instead.
    result = source ? "Press Ctrl C" : "Copy failed";
    if (source) getSelection().selectAllChildren(source);
  }
  if (!label) return;
  label.textContent = result;
  const live = document.getElementById("live");
  if (live) live.textContent = result;
  setTimeout(() => { label.textContent = defaultText; }, 2000);
});
