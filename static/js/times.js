// Local times: <time> elements inside [data-times="local"] are rewritten in the browser's time
// zone, whose name goes into [data-zone]. Without this script they stay in UTC.
function localizeTimes() {
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";
  for (const scope of document.querySelectorAll('[data-times="local"]')) {
    for (const time of scope.querySelectorAll("time[datetime]:not([data-local])")) {
      const moment = new Date(time.dateTime);
      if (Number.isNaN(moment.getTime())) continue;
      const format = (options) => moment.toLocaleString("en-GB", options);
      time.textContent = `${format({ day: "numeric", month: "short" })} ${format({ hour: "2-digit", minute: "2-digit", second: "2-digit" })}`;
      time.title = format({ dateStyle: "full", timeStyle: "long", timeZone: "UTC" });
      time.dataset.local = "";
    }
  }
  for (const name of document.querySelectorAll("[data-zone]")) name.textContent = zone;
}

localizeTimes();
document.addEventListener("htmx:afterSettle", localizeTimes);
