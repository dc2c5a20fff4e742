// [data-poll="url"]: replaces itself with the response every 2 s while data-poll-state is "running",
// every 60 s while "idle", never while "done" or while the page is hidden. After five failures it
// shows "Paused" in its [data-poll-note] until its [data-poll-resume] is pressed.
const INTERVALS = { running: 2000, idle: 60000 }; // milliseconds
const MAX_FAILURES = 5;
const polls = new Map();

function pollOf(element) {
  const url = element.dataset.poll;
  if (!polls.has(url)) polls.set(url, { last: Date.now(), failures: 0, busy: false });
  return polls.get(url);
}

function showPaused(element, paused) {
  const note = element.querySelector("[data-poll-note]");
  const resume = element.querySelector("[data-poll-resume]");
  if (note) note.textContent = paused ? "Paused after five failed attempts." : "";
  if (resume) resume.hidden = !paused;
}

async function refresh(element, poll) {
  poll.busy = true;
  poll.last = Date.now();
  const ok = new Promise((resolve) => {
    element.addEventListener("htmx:afterRequest", (event) => resolve(event.detail.successful), { once: true });
    htmx.ajax("GET", element.dataset.poll, { source: element, target: element, swap: "outerHTML" })
      .then(() => resolve(true), () => resolve(false));
  });
  poll.failures = (await ok) ? 0 : poll.failures + 1;
  poll.busy = false;
  if (poll.failures >= MAX_FAILURES && element.isConnected) showPaused(element, true);
}

function pollDue(immediately) {
  if (document.hidden) return;
  for (const element of document.querySelectorAll("[data-poll]")) {
    const poll = pollOf(element);
    const interval = INTERVALS[element.dataset.pollState];
    if (!interval || poll.busy || poll.failures >= MAX_FAILURES) continue;
    // Do not replace an element in which the user is typing: it would lose the focus.
    if (element.contains(document.activeElement) && element.querySelector(":focus:is(input, textarea, select)")) continue;
    if (immediately || Date.now() - poll.last >= interval) refresh(element, poll);
  }
}

setInterval(() => pollDue(false), 500);
document.addEventListener("visibilitychange", () => pollDue(true));
document.addEventListener("click", (event) => {
  const element = event.target.closest("[data-poll-resume]")?.closest("[data-poll]");
  if (!element) return;
  pollOf(element).failures = 0;
  showPaused(element, false);
  refresh(element, pollOf(element));
});
