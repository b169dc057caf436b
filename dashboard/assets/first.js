// Sets the colour scheme before anything is drawn: the address's, else the viewer's own choice, else the system's.
(function () {
  "use strict";
  const KEY = "mantine-color-scheme-value"; // where mantine itself looks
  let scheme = new URLSearchParams(location.search).get("theme");
  try {
    if (scheme === "dark" || scheme === "light") localStorage.setItem(KEY, scheme);
    else scheme = localStorage.getItem(KEY);
  } catch { /* storage is off: the system's choice holds */ }
  if (scheme !== "dark" && scheme !== "light") {
    scheme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  }
  document.documentElement.setAttribute("data-mantine-color-scheme", scheme);
  document.documentElement.setAttribute("data-ag-theme-mode", scheme);
})();
