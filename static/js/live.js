// Keeps [data-live="topic topic"] parts of the page current. A stream of server-sent events names the
// topics that changed; the page is then fetched again and each part with the same id is replaced.
// Without a stream it polls. Hidden tabs and paused pages do nothing. A part with data-live-hold is
// not replaced while the pointer or the focus is in it, so that nothing moves under them.
const POLL = 5000; // milliseconds, without a stream
const MAX_ERRORS = 3; // in a row, before polling
const mark = document.querySelector("[data-live-mark]");
const stale = new Set();
let source = null;
let errors = 0;
let paused = false;
let fetching = false;
let last = 0;
let timer = 0;
let pollTimer = 0;

const parts = () => [...document.querySelectorAll("[data-live]")];
const isLive = () => document.querySelector("main [data-live]") !== null; // the navigation alone opens no stream
const topicsOf = (part) => part.dataset.live.split(" ");

function isHeld(part) {
  if (part.querySelector(":focus:is(input, textarea, select)")) return true;
  if (part.querySelector("dialog[open], [data-select-row]:checked")) return true;
  if (part.querySelector('[data-poll-state="running"]')) return true; // poll.js announces its end
  return "liveHold" in part.dataset && part.matches(":hover, :focus-within");
}

function showState() {
  if (!mark) return;
  const waiting = [...stale].some((part) => part.isConnected && isHeld(part));
  const state = paused ? "Paused" : waiting ? "Live, update waiting" : source ? "Live" : "Live, every 5 s";
  mark.querySelector("[data-live-text]").textContent = state;
  mark.dataset.state = paused ? "paused" : "on";
  mark.setAttribute("aria-pressed", String(!paused));
}

function replace(part, fresh) {
  const open = [...part.querySelectorAll("details")].map((details) => details.open);
  const scrolls = [...part.querySelectorAll(".table-scroll")].map((box) => [box.scrollLeft, box.scrollTop]);
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const focusPath = focused?.id ? `#${CSS.escape(focused.id)}` : focused?.getAttribute("href") && `a[href="${CSS.escape(focused.getAttribute("href"))}"]`;
  part.replaceChildren(...fresh.childNodes);
  part.querySelectorAll("details").forEach((details, index) => { details.open = open[index] ?? details.open; });
  part.querySelectorAll(".table-scroll").forEach((box, index) => { [box.scrollLeft, box.scrollTop] = scrolls[index] ?? [0, 0]; });
  if (focusPath) part.querySelector(focusPath)?.focus({ preventScroll: true });
  window.htmx?.process(part);
}

async function refresh() {
  timer = 0;
  const due = [...stale].filter((part) => part.isConnected && !isHeld(part));
  showState();
  if (!due.length || paused || document.hidden || fetching) return;
  fetching = true;
  last = Date.now();
  for (const part of due) stale.delete(part);
  try {
    const response = await fetch(location.href, { headers: { "X-Live": "1" }, redirect: "error" });
    if (!response.ok) throw new Error(String(response.status));
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const part of due) {
      const fresh = page.getElementById(part.id);
      if (!fresh || !part.isConnected || part.innerHTML === fresh.innerHTML) continue;
      if (paused || isHeld(part)) stale.add(part);
      else replace(part, fresh);
    }
    const title = page.querySelector("title")?.textContent;
    if (title) document.title = title;
  } catch {
    for (const part of due) stale.add(part);
  }
  fetching = false;
  showState();
  if (stale.size) schedule();
}

function schedule() {
  if (timer || paused || document.hidden) return;
  const interval = Math.min(...[...stale].map((part) => Number(part.dataset.liveEvery || 1) * 1000));
  timer = setTimeout(refresh, Math.max(0, last + interval - Date.now()));
}

function markStale(topics) {
  for (const part of parts()) {
    if (!topics || topicsOf(part).some((topic) => topics.includes(topic))) stale.add(part);
  }
  if (stale.size) schedule();
}

function connect() {
  disconnect();
  if (paused || document.hidden || !isLive()) return;
  if (errors >= MAX_ERRORS || !window.EventSource) {
    pollTimer = setInterval(() => markStale(null), POLL);
    showState();
    return;
  }
  const query = new URLSearchParams([...new Set(parts().flatMap(topicsOf))].map((topic) => ["topic", topic]));
  query.set("age", String(Math.ceil(performance.now()))); // what changed since then is reported at once
  let opened = false;
  source = new EventSource(`/live?${query}`);
  source.addEventListener("open", () => {
    errors = 0;
    showState();
    if (opened) markStale(null); // changes were missed while it was away
    opened = true;
  });
  source.addEventListener("change", (event) => markStale(event.data.split(" ")));
  source.addEventListener("error", () => {
    errors += 1;
    if (errors >= MAX_ERRORS || source.readyState === EventSource.CLOSED) {
      errors = MAX_ERRORS;
      connect();
    }
  });
  showState();
}

function disconnect() {
  source?.close();
  source = null;
  clearInterval(pollTimer);
}

mark?.addEventListener("click", () => {
  paused = !paused;
  connect();
  if (!paused) markStale(null);
  showState();
});
document.addEventListener("visibilitychange", () => {
  connect();
  if (!document.hidden) markStale(null);
});
document.addEventListener("pointerout", () => { if (stale.size) schedule(); });
if (isLive()) {
  if (mark) mark.hidden = false;
  connect();
}
