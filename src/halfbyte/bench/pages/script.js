"use strict";
(() => {
  const root = document.documentElement;
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.querySelector(".theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; });

  // A legend's button hides its series.
  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      const shown = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(shown));
      for (const series of button.closest(".card").querySelectorAll("[data-series]")) {
        if (series.dataset.series === button.dataset.of) series.classList.toggle("off", !shown);
      }
    });
  }

  // What a point says, beside it: for a mouse, a finger and the keyboard.
  const tip = document.getElementById("tip");
  const show = (target) => {
    tip.textContent = target.dataset.tip;
    tip.hidden = false;
    const at = target.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const x = Math.min(Math.max(8, at.left + at.width / 2 - size.width / 2), innerWidth - size.width - 8);
    const y = at.top - size.height - 8 < 8 ? at.bottom + 8 : at.top - size.height - 8;
    tip.style.left = `${x}px`;
    tip.style.top = `${y}px`;
  };
  const find = (event) => event.target instanceof Element ? event.target.closest("[data-tip]") : null;
  for (const name of ["pointerover", "focusin", "click"]) {
    document.addEventListener(name, (event) => { const target = find(event); if (target) show(target); else tip.hidden = true; });
  }
  document.addEventListener("focusout", () => { tip.hidden = true; });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();
