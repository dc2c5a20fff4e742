// [data-poll="url"]: replaces itself with the answer, every 2 s while data-poll-state is "running",
// every 60 s while "idle", never while "done" or while the page is hidden. After five failures it
// writes "Paused" in its [data-poll-note], and goes on when its [data-poll-resume] is pressed.
const PACE = { running: 2000, idle: 60000 };
const FAILURES = 5;
const polls = new Map();

function pollOf(element) {
  const url = element.dataset.poll;
  if (!polls.has(url)) polls.set(url, { last: Date.now(), failures: 0, busy: false });
  return polls.get(url);
}

function showPaused(element, paused) {
  const note = element.querySelector("[data-poll-note]");
  const resume = element.querySelector("[data-poll-resume]");
  if (note) note.textContent = paused ? "Paused: five tries had no answer." : "";
  if (resume) resume.hidden = !paused;
}

async function ask(element, poll) {
  poll.busy = true;
  poll.last = Date.now();
  const ok = new Promise((resolve) => {
    element.addEventListener("htmx:afterRequest", (event) => resolve(event.detail.successful), { once: true });
    htmx.ajax("GET", element.dataset.poll, { source: element, target: element, swap: "outerHTML" })
      .then(() => resolve(true), () => resolve(false));
  });
  poll.failures = (await ok) ? 0 : poll.failures + 1;
  poll.busy = false;
  if (poll.failures >= FAILURES && element.isConnected) showPaused(element, true);
}

function look(now) {
  if (document.hidden) return;
  for (const element of document.querySelectorAll("[data-poll]")) {
    const poll = pollOf(element);
    const pace = PACE[element.dataset.pollState];
    if (!pace || poll.busy || poll.failures >= FAILURES) continue;
    // A person at work inside the part keeps it: a swap would take the focus away.
    if (element.contains(document.activeElement) && element.querySelector(":focus:is(input, textarea, select)")) continue;
    if (now || Date.now() - poll.last >= pace) ask(element, poll);
  }
}

setInterval(() => look(false), 500);
document.addEventListener("visibilitychange", () => look(true));
document.addEventListener("click", (event) => {
  const element = event.target.closest("[data-poll-resume]")?.closest("[data-poll]");
  if (!element) return;
  pollOf(element).failures = 0;
  showPaused(element, false);
  ask(element, pollOf(element));
});
