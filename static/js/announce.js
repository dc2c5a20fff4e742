// Speaks in #live what the server sends as HX-Trigger {"announce": "…"}, and writes in #failures
// what went wrong with a request that nobody else reports.
document.addEventListener("announce", (event) => {
  document.getElementById("live").textContent = event.detail.value;
});

function sayFailure(event, sentence) {
  if (event.detail.requestConfig?.elt?.closest?.("[data-poll]")) return;
  const notice = document.createElement("p");
  notice.className = "notice bad inline-notice";
  notice.textContent = sentence;
  document.getElementById("failures").replaceChildren(notice);
}

document.addEventListener("htmx:responseError", (event) => {
  const { xhr } = event.detail;
  const id = xhr.getResponseHeader("X-Request-Id");
  const where = id ? ` Request ${id}.` : "";
  const page = new DOMParser().parseFromString(xhr.responseText, "text/html");
  const sentence = page.querySelector("[data-sentence]")?.textContent.trim();
  if (sentence) sayFailure(event, `${sentence}${where}`);
  else if (xhr.status === 403) sayFailure(event, `You may not do this.${where}`);
  else if (xhr.status === 404) sayFailure(event, `This is gone. Reload the page.${where}`);
  else sayFailure(event, `Toolcrib answered with error ${xhr.status}. Nothing was changed on this page.${where}`);
});

document.addEventListener("htmx:sendError", (event) => {
  sayFailure(event, "Toolcrib did not answer. Check the connection and try again.");
});

document.addEventListener("htmx:beforeRequest", (event) => {
  if (!event.detail.requestConfig?.elt?.closest?.("[data-poll]")) {
    document.getElementById("failures").replaceChildren();
  }
});
