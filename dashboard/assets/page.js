// The page's own hand: fetches a look every few seconds, sets what changed, and keeps the state in the address.
(function () {
  "use strict";

  const SCHEME_KEY = "mantine-color-scheme-value";
  const PATIENCE_MS = 15000;
  const FIRST_REFRESH_S = 2;
  const STATE = ["node", "engine", "range", "from", "to", "tz", "lang", "theme", "live"];

  const marks = {}; // part -> mark of what it shows
  let meta = null; // of the last look
  let heardAt = 0; // performance.now() of the last look
  let failing = false;
  let looking = false;
  let again = false;
  let timer = null;
  let looks = 0;

  const set = (id, properties) => window.dash_clientside.set_props(id, properties);
  const root = document.documentElement;
  const address = () => new URLSearchParams(location.search);
  const paused = () => address().get("live") === "0";
  const scheme = () => (root.getAttribute("data-mantine-color-scheme") === "dark" ? "dark" : "light");

  // --- looking

  function question() {
    const query = address();
    query.delete("live");
    query.set("theme", scheme());
    if (query.get("tz") === "local") {
      query.set("zone", Intl.DateTimeFormat().resolvedOptions().timeZone || "");
      query.set("offset", String(-new Date().getTimezoneOffset()));
    }
    return query.toString();
  }

  // One at a time: a slow answer delays the next look, it never piles up.
  async function look() {
    clearTimeout(timer);
    if (looking) {
      again = true;
      return;
    }
    looking = true;
    const asked = question();
    const abort = new AbortController();
    const patience = setTimeout(() => abort.abort(), PATIENCE_MS);
    try {
      const answer = await fetch(`view?${asked}`, { signal: abort.signal, cache: "no-store" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      const found = await answer.json();
      if (asked === question()) show(found);
      else again = true;
      failing = false;
    } catch {
      failing = true;
    } finally {
      clearTimeout(patience);
      looking = false;
    }
    tellAge();
    if (again) {
      again = false;
      look();
    } else {
      schedule();
    }
  }

  function schedule() {
    clearTimeout(timer);
    if (paused() || document.hidden) return;
    timer = setTimeout(look, 1000 * (meta ? meta.refresh_s : FIRST_REFRESH_S));
  }

  function show(found) {
    for (const [id, mark, properties] of found.parts) {
      if (marks[id] === mark) continue;
      marks[id] = mark;
      set(id, properties);
    }
    meta = found.meta;
    heardAt = performance.now();
    looks += 1;
    root.dataset.looks = String(looks);
    root.lang = meta.lang === "zh" ? "zh-CN" : meta.lang;
    document.title = meta.title;
    const query = address();
    if (meta.node !== null && query.get("node") === null) {
      // whom the server chose stays chosen, so that the page does not jump when another becomes the worst
      query.set("node", meta.node);
      query.set("engine", meta.engine);
      query.set("range", meta.range);
      history.replaceState(null, "", `?${query}`);
    }
    set("csv", { href: `window.csv?${question()}` });
  }

  // --- the age of what is shown

  function words(name, values) {
    let text = (meta && meta.words[name]) || "";
    for (const [key, value] of Object.entries(values || {})) text = text.replace(`{${key}}`, value);
    return text;
  }

  function inWords(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    if (whole < 60) return words("s", { n: whole });
    if (whole < 3600) return words("min", { n: Math.floor(whole / 60) });
    if (whole < 86400) return words("h", { n: Math.floor(whole / 3600) });
    return words("d", { n: Math.floor(whole / 86400) });
  }

  let told = "";
  function tellAge() {
    if (!meta) return;
    const since = (performance.now() - heardAt) / 1000;
    const age = meta.age_s === null ? "—" : inWords(meta.age_s + since);
    const mode = failing ? "no_answer" : paused() ? "paused" : meta.trouble ? "no_store" : "live";
    const text = words(mode, { age });
    const look = mode === "live" && meta.age_s !== null && meta.age_s + since > meta.stale_s ? "stale" : mode;
    if (`${look} ${text}` === told) return;
    told = `${look} ${text}`;
    set("age", { children: text });
    set("live", { className: `button live live-${look}`, "aria-pressed": mode === "paused" ? "false" : "true" });
  }

  // --- the address

  function go(changes) {
    const query = address();
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === undefined) query.delete(name);
      else query.set(name, value);
    }
    if (`?${query}` === location.search) return;
    history.pushState(null, "", `?${query}`);
    look();
  }

  function applyScheme(wanted) {
    root.setAttribute("data-mantine-color-scheme", wanted);
    root.setAttribute("data-ag-theme-mode", wanted);
    try {
      localStorage.setItem(SCHEME_KEY, wanted);
    } catch { /* storage is off: it holds for this page */ }
    set("mantine", { forceColorScheme: wanted });
  }

  function toMs(value) {
    // plotly gives shifted times as text without a zone, or as a number
    const shifted = typeof value === "number" ? value : Date.parse(`${String(value).replace(" ", "T")}Z`);
    return Number.isFinite(shifted) ? Math.round(shifted - meta.offset_ms) : null;
  }

  function zoom(change) {
    if (!change || !meta) return;
    if (change["xaxis.autorange"]) {
      go({ from: null, to: null });
      return;
    }
    const range = change["xaxis.range"] || [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    const from = range[0] === undefined ? null : toMs(range[0]);
    const to = range[1] === undefined ? null : toMs(range[1]);
    if (from !== null && to !== null && to > from) go({ from, to });
  }

  function choosePair(id) {
    const [node, engine] = String(id).split("\u001f");
    if (!meta || (node === meta.node && engine === meta.engine)) return;
    go({ node, engine });
  }

  async function copyLink() {
    const query = address();
    for (const name of [...query.keys()]) if (!STATE.includes(name)) query.delete(name);
    if (meta && meta.node !== null) {
      query.set("node", meta.node);
      query.set("engine", meta.engine);
      query.set("range", meta.range);
      query.set("tz", meta.tz);
      query.set("lang", meta.lang);
    }
    query.set("theme", scheme());
    const link = `${location.origin}${location.pathname}?${query}`;
    root.dataset.copied = link;
    try {
      await navigator.clipboard.writeText(link);
    } catch {
      // without https the clipboard is closed: the old way
      const field = document.createElement("textarea");
      field.value = link;
      document.body.appendChild(field);
      field.select();
      document.execCommand("copy");
      field.remove();
    }
    const before = document.getElementById("copy").textContent;
    set("copy", { children: words("copied") });
    setTimeout(() => set("copy", { children: before }), 1500);
  }

  // --- evidence points at its lane

  function light(event) {
    const glow = document.getElementById("glow");
    const line = event.type === "mouseover" || event.type === "focusin" ? event.target.closest("[data-lane]") : null;
    const plot = document.querySelector("#chart .js-plotly-plot");
    const lanes = (plot && plot.layout && plot.layout.meta && plot.layout.meta.lanes) || {};
    const place = line && lanes[line.dataset.lane];
    glow.classList.toggle("lit", Boolean(place));
    if (place) Object.assign(glow.style, { top: `${place[0] - 5}px`, height: `${place[1] - place[0] + 10}px` });
  }

  // --- what dash calls

  const handlers = {
    "range.value": (value) => value && meta && value !== meta.range && go({ range: value, from: null, to: null }),
    "pair.value": (value) => value && choosePair(value),
    "zone.value": (value) => value && meta && value !== meta.tz && go({ tz: value }),
    "language.value": (value) => value && meta && value !== meta.lang && go({ lang: value }),
    "theme.n_clicks": (clicks) => {
      if (!clicks) return;
      applyScheme(scheme() === "dark" ? "light" : "dark");
      go({ theme: scheme() });
    },
    "live.n_clicks": (clicks) => {
      if (!clicks) return;
      go({ live: paused() ? null : "0" });
      tellAge();
    },
    "copy.n_clicks": (clicks) => clicks && copyLink(),
    "zoomed.n_clicks": (clicks) => clicks && go({ from: null, to: null }),
    "table.cellClicked": (cell) => cell && choosePair(cell.rowId),
    "fleet.clickData": (click) => {
      const names = click && click.points && click.points[0] && click.points[0].customdata;
      if (names && names[0]) choosePair(names.join("\u001f"));
    },
    "chart.relayoutData": zoom,
  };

  let started = false;
  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.pairscope = {
    start: () => {
      if (started) return;
      started = true;
      applyScheme(scheme());
      addEventListener("popstate", () => {
        const wanted = address().get("theme");
        if (wanted && wanted !== scheme()) applyScheme(wanted);
        look();
      });
      document.addEventListener("visibilitychange", () => {
        if (document.hidden) clearTimeout(timer);
        else if (!paused()) look();
      });
      const walk = document.getElementById("steps");
      for (const kind of ["mouseover", "mouseout", "focusin", "focusout"]) walk.addEventListener(kind, light);
      setInterval(tellAge, 1000);
      look();
    },
    chose: (...values) => {
      const triggered = window.dash_clientside.callback_context.triggered || [];
      for (const { prop_id: name, value } of triggered) {
        if (handlers[name]) handlers[name](value);
      }
    },
  };

  // --- the table's own cells

  const functions = (window.dashAgGridFunctions = window.dashAgGridFunctions || {});
  functions.shownNumber = (value) =>
    value === null || value === undefined ? "—" : String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u2009");

  const components = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});
  components.NodeCell = (props) =>
    window.React.createElement(
      "span",
      { className: "node-cell" },
      props.value,
      props.data.simulated ? window.React.createElement("span", { className: "simulated" }, props.data.simulated) : null
    );
})();
