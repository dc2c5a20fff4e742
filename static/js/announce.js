// Announces HX-Trigger {"announce": "…"} in the #live region, and shows errors of htmx requests in
// #failures, except for polls, which report their own.
document.addEventListener("announce", (event) => {
  document.getElementById("live").textContent = event.detail.value;
});

function showFailure(event, message) {
  if (event.detail.requestConfig?.elt?.closest?.("[data-poll]")) return;
  const notice = document.createElement("p");
  notice.className = "notice bad inline-notice";
  notice.textContent = message;
  document.getElementById("failures").replaceChildren(notice);
}

document.addEventListener("htmx:responseError", (event) => {
  const { xhr } = event.detail;
  const id = xhr.getResponseHeader("X-Request-Id");
  const requestId = id ? ` Request ${id}.` : "";
  const page = new DOMParser().parseFromString(xhr.responseText, "text/html");
  const message = page.querySelector("[data-sentence]")?.textContent.trim();
  if (message) showFailure(event, `${message}${requestId}`);
  else if (xhr.status === 403) showFailure(event, `You do not have permission to do this.${requestId}`);
  else if (xhr.status === 404) showFailure(event, `Not found. Reload the page.${requestId}`);
  else showFailure(event, `Toolcrib returned error ${xhr.status}. The page was not updated.${requestId}`);
});

document.addEventListener("htmx:sendError", (event) => {
  showFailure(event, "Toolcrib did not respond. Check the connection and retry.");
});

document.addEventListener("htmx:beforeRequest", (event) => {
  if (!event.detail.requestConfig?.elt?.closest?.("[data-poll]")) {
    document.getElementById("failures").replaceChildren();
  }
});
