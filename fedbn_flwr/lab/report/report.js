// Draws the figures of a report. Each is a script of JSON beside its place: plotly's data and layout, with the names of
// CSS variables as colours, and in "units" what changes when the curves are drawn over exchanges or bytes.
(() => {
  "use strict";
  const root = document.documentElement;
  const PAPER = 650; // pixels: the width of a figure on paper
  const figures = [...document.querySelectorAll("figure")].map((figure) => ({
    place: figure.querySelector(".plot"),
    drawing: JSON.parse(figure.querySelector('script[type="application/json"]').textContent),
  }));

  const chosen = () => document.querySelector('input[name="unit"]:checked')?.value ?? "rounds";

  // A copy of a value with colours in place of the names of variables.
  const coloured = (value, style) => {
    const [, name, opacity] = (typeof value === "string" && value.match(/^(--[a-z0-9]+)(?:\/(\w+))?$/)) || [];
    const colour = name ? style.getPropertyValue(name).trim() : "";
    if (colour) return colour + (opacity ?? ""); // a method or a class may be called "--" or "--lr 0.1"
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
  };

  const axis = (own, narrow) => ({
    gridcolor: "--line",
    zerolinecolor: "--line",
    linecolor: "--line",
    automargin: true,
    fixedrange: narrow, // a finger scrolls the page
    ...own,
    title: { standoff: 8, font: { size: 12 }, ...own?.title },
  });

  const wrapped = (name) => String(name).replace(/(.{9,}?) /g, "$1<br>");

  const draw = ({ place, drawing }) => {
    const unit = drawing.units?.[chosen()];
    const width = root.dataset.print ? PAPER : place.clientWidth;
    const narrow = width < 560;
    const own = structuredClone(drawing.layout);
    const data = structuredClone(drawing.data);
    if (unit) {
      unit.x.forEach((x, at) => { data[at].x = x; });
      Object.assign(own, structuredClone(unit.layout));
    }
    const layout = {
      paper_bgcolor: "--paper/00",
      plot_bgcolor: "--paper/00",
      margin: { l: 8, r: 12, t: own.annotations?.length ? 28 : 12, b: 8 },
      ...own,
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "--ink" },
      hoverlabel: { bgcolor: "--paper", bordercolor: "--line", font: { color: "--ink" } },
      legend: { orientation: "h", x: 0, y: 0, xref: "paper", yref: "container", yanchor: "bottom", itemwidth: 40 },
      xaxis: axis(own.xaxis, narrow),
      yaxis: axis(own.yaxis, narrow),
      width,
      height: drawing.height,
    };
    if (narrow && own.yaxis?.type === "category") {
      const names = [...new Set(data.flatMap((trace) => trace.y))];
      Object.assign(layout.yaxis, { tickmode: "array", tickvals: names, ticktext: names.map(wrapped) });
    }
    const style = getComputedStyle(root);
    const config = { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"], displayModeBar: narrow ? false : "hover" };
    const paint = () => Plotly.react(place, coloured(data, style), coloured(layout, style), config);
    return paint().then(() => {
      const legend = place.querySelector(".legend")?.getBoundingClientRect().height ?? 0;
      if (!legend) return undefined;
      layout.height = drawing.height + Math.ceil(legend); // the plot keeps its own height
      return paint();
    });
  };

  const redraw = () => { if (globalThis.Plotly) figures.forEach(draw); };
  // plotly's code is in the page as gzip in base64.
  const unpack = async (packed) => {
    const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
    const script = document.createElement("script");
    script.textContent = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    document.head.append(script);
  };
  let waiting = 0;
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 100);
  };

  // What the reader chose survives the reloads of a live report.
  const memory = {
    read: () => { try { return JSON.parse(sessionStorage.getItem(location.pathname)) ?? {}; } catch { return {}; } },
    write: (state) => { try { sessionStorage.setItem(location.pathname, JSON.stringify(state)); } catch { /* not kept */ } },
  };
  const details = [...document.querySelectorAll("details")];
  const remember = () => memory.write({ unit: chosen(), open: details.flatMap((one, at) => (one.open ? [at] : [])) });
  const before = memory.read();
  const button = document.querySelector(`input[name="unit"][value="${before.unit}"]`);
  if (button) button.checked = true;
  before.open?.forEach((at) => { if (details[at]) details[at].open = true; });
  details.forEach((one) => one.addEventListener("toggle", () => { if (!("print" in root.dataset)) remember(); }));
  const live = Number(document.body.dataset.live);
  const again = () => (document.hidden ? setTimeout(again, 1000) : location.reload());
  if (live) setTimeout(again, 1000 * live);

  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target instanceof HTMLDetailsElement) target.open = true;
  };
  addEventListener("hashchange", open);
  open();

  document.querySelectorAll('input[name="unit"]').forEach((input) => input.addEventListener("change", () => {
    remember();
    redraw();
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const print = (on) => {
    if (on === "print" in root.dataset) return;
    if (on) root.dataset.print = "yes";
    else delete root.dataset.print;
    document.querySelectorAll("details[id]").forEach((one) => {
      if (on) one.dataset.was = one.open ? "open" : "";
      one.open = on || one.dataset.was === "open";
    });
    redraw();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("print").addEventListener("change", (event) => print(event.matches));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; later(); } });
  const packed = document.getElementById("plotly")?.textContent;
  // Browsers older than May 2023 draw a report with plain plotly, of 2 MB, and show the numbers of each figure in others.
  if (globalThis.Plotly) redraw();
  else if (packed && "DecompressionStream" in globalThis) unpack(packed).then(redraw);
  else {
    figures.forEach(({ place }) => { place.textContent = "This browser is too old to draw this report, made without --plain. The numbers are below."; });
    document.querySelectorAll("figure details").forEach((one) => { one.open = true; });
  }
})();
