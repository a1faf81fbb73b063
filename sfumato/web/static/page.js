"use strict";
// What a browser adds to the pages: a live plan, progress of a run, dropped files. Every page works without it.

const find = (selector) => document.querySelector(selector);

// The token is behind the # of the link, which is sent to no server.
const enter = find("[data-enter]");
if (enter) {
  const comeIn = () => {
    if (location.hash.length < 2) return;
    enter.elements.token.value = location.hash.slice(1);
    history.replaceState(null, "", location.pathname);
    enter.submit();
  };
  comeIn();
  window.addEventListener("hashchange", comeIn);
}

const link = find("[data-select]");
if (link) link.addEventListener("focus", () => link.select());

const form = find("form[data-plan]");
if (form) {
  const target = find("[data-target]");
  const slider = form.querySelector("[data-log]");
  const epsilon = form.elements.epsilon;
  let timer, request;

  const toSlider = () => { const value = parseFloat(epsilon.value); if (value > 0) slider.value = Math.log10(value); };
  const showParts = () => form.querySelectorAll("[data-if]").forEach((part) => {
    const [name, value] = part.dataset.if.split("=");
    part.hidden = form.elements[name].value !== value;
  });
  const summarize = () => {
    const found = target.querySelector("[data-summary]");
    form.querySelector("output").textContent = found ? found.dataset.summary : "";
  };
  const update = async () => {
    if (request) request.abort();
    request = new AbortController();
    const fields = new FormData(form);
    fields.delete("csrf");
    fields.delete("request");
    target.setAttribute("aria-busy", "true");
    try {
      const answer = await fetch("/plan?" + new URLSearchParams(fields), { signal: request.signal });
      target.innerHTML = await answer.text();
      target.removeAttribute("aria-busy");
      summarize();
    } catch (error) {
      if (error.name !== "AbortError") { target.removeAttribute("aria-busy"); target.textContent = "The server does not answer."; }
    }
  };

  slider.hidden = false;
  toSlider();
  showParts();
  summarize();
  form.querySelector("[data-update]").hidden = true;
  slider.addEventListener("input", () => { epsilon.value = String(parseFloat((10 ** slider.value).toPrecision(2))); });
  epsilon.addEventListener("input", toSlider);
  for (const kind of ["input", "change"]) {
    form.addEventListener(kind, (event) => {
      showParts();
      if (["issuer", "subject", "number"].includes(event.target.name)) return;
      clearTimeout(timer);
      timer = setTimeout(update, 250);
    });
  }
  form.addEventListener("submit", () => { form.querySelector("[data-start]").disabled = true; });
  window.addEventListener("pageshow", () => { form.querySelector("[data-start]").disabled = false; });
}

const status = find("[data-status]");
if (status) {
  const poll = async () => {
    try {
      const answer = await fetch(status.dataset.status);
      if (!answer.ok) return;
      const state = answer.headers.get("x-state");
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const moving = (part) => part.querySelector("[data-moving]");
      // In the same state only figures move: a button that is replaced would lose its click or its focus.
      if (state === status.dataset.state) moving(status).replaceWith(moving(fresh));
      else status.replaceChildren(...fresh.body.childNodes);
      if (state !== status.dataset.state) find("[data-live]").textContent = "The run is " + state;
      status.dataset.state = state;
    } catch { /* the server may be restarting: try again */ }
    if (status.dataset.state === "running") setTimeout(poll, 1000);
  };
  if (status.dataset.state === "running") setTimeout(poll, 1000);
}

const drop = find("form[data-drop]");
if (drop) {
  const zone = drop.querySelector(".drop");
  for (const name of ["dragover", "dragleave", "drop"]) {
    zone.addEventListener(name, (event) => {
      event.preventDefault();
      zone.classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length) {
        drop.elements.file.files = event.dataTransfer.files;
        drop.requestSubmit();
      }
    });
  }
  drop.addEventListener("submit", () => { drop.querySelector("[data-busy]").hidden = false; });
}
