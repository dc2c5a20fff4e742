// [data-times="local"]: the times inside are written in the reader's own zone, whose name goes into
// [data-zone]. Without this script they stay in UTC, as the server wrote them.
function writeLocal() {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
  for (const scope of document.querySelectorAll('[data-times="local"]')) {
    for (const time of scope.querySelectorAll("time[datetime]:not([data-local])")) {
      const moment = new Date(time.dateTime);
      if (Number.isNaN(moment.getTime())) continue;
      const part = (options) => moment.toLocaleString("en-GB", options);
      time.textContent = `${part({ day: "numeric", month: "short" })} ${part({ hour: "2-digit", minute: "2-digit", second: "2-digit" })}`;
      time.title = `${part({ dateStyle: "full", timeStyle: "long" })}`;
      time.dataset.local = "";
    }
  }
  for (const name of document.querySelectorAll("[data-zone]")) name.textContent = zone;
}

writeLocal();
document.addEventListener("htmx:afterSettle", writeLocal);
