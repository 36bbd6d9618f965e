"""How the report looks, and what it does under the pointer: the CSS and the few lines of JavaScript it carries inline.

Goes into the <head> and the end of <body> by `report.py`. The page is complete without the script. Text reaches the
tooltip as textContent only, so nothing a model wrote can become markup.
"""

PALETTE = 6  # colours c0..c5; a seventh run starts over

CSS = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --ink: #1d2126; --soft: #626a73; --faint: #9aa1a9;
  --rule: #e6e7e9; --grid: #eef0f1; --good: #1a7f4b; --warn: #b45309; --gate: #1d212612; --target: #1a7f4b;
  --c0: #2f66d0; --c1: #d1660f; --c2: #0d8a7b; --c3: #8a4fd0; --c4: #c23a66; --c5: #75801a; }
@media (prefers-color-scheme: dark) { :root { --bg: #14161a; --card: #1b1e23; --ink: #e7e9ec; --soft: #a2a9b3;
  --faint: #747c87; --rule: #2b3037; --grid: #2b3138; --good: #4cc38a; --warn: #f0a04b; --gate: #e7e9ec14;
  --target: #4cc38a; --c0: #77a5ff; --c1: #f39a4f; --c2: #4bc9b8; --c3: #bd93f5; --c4: #f07fa3; --c5: #bcc858; } }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) }
.c3 { --c: var(--c3) } .c4 { --c: var(--c4) } .c5 { --c: var(--c5) }
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink); -webkit-font-smoothing: antialiased;
  font: 15px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 56px 32px 96px }
header { margin-bottom: 40px }
header p { margin: 0; color: var(--soft) }
.eyebrow { font-size: 12px; letter-spacing: .08em; text-transform: uppercase; color: var(--faint) }
h1 { margin: 6px 0 8px; font-size: 32px; line-height: 1.2; font-weight: 650; letter-spacing: -.015em;
  overflow-wrap: anywhere }
h2 { margin: 64px 0 20px; font-size: 19px; font-weight: 620; letter-spacing: -.005em }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 14px }
.card { padding: 18px 20px 16px; background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
.card .label { font-size: 13px; color: var(--soft) }
.card .value { margin: 3px 0 2px; font-size: 25px; line-height: 1.25; font-weight: 620; letter-spacing: -.01em;
  font-variant-numeric: tabular-nums }
.note { font-size: 12.5px; line-height: 1.45; color: var(--soft); font-variant-numeric: tabular-nums }
.good .value, td.good b { color: var(--good) } .warn .value, td.warn b { color: var(--warn) }
.scroll { overflow-x: auto; background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
table { width: 100%; border-collapse: collapse }
th, td { padding: 11px 20px; text-align: left; vertical-align: top; border-top: 1px solid var(--rule) }
table > :first-child > tr:first-child > * { border-top: 0 }
thead th { font-size: 13px; font-weight: 600; color: var(--soft) }
tbody th { font-weight: 400; color: var(--soft); white-space: nowrap; width: 1% }
td b { display: block; font-weight: 600; font-variant-numeric: tabular-nums }
.legend { display: flex; flex-wrap: wrap; gap: 6px 24px; margin: 0 0 18px; padding: 0; list-style: none;
  font-size: 13.5px } .legend li + .note { margin-left: auto }
.dot { display: inline-block; width: 10px; height: 10px; margin-right: 8px; border-radius: 3px; background: var(--c) }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 18px }
figure { position: relative; min-width: 0; margin: 0; padding: 18px 18px 14px; background: var(--card);
  border: 1px solid var(--rule); border-radius: 10px }
.about { margin: -12px 0 18px; color: var(--soft) }
figure .legend { gap: 2px 16px; margin: 0 0 8px 6px; font-size: 12.5px }
h3 { margin: 0 0 8px 6px; font-size: 14.5px; font-weight: 620 }
h3 span { margin-left: 6px; font-size: 13px; font-weight: 400; color: var(--soft) }
figcaption { margin: 6px 0 2px 6px; font-size: 12.5px; color: var(--soft) }
.empty p { margin: 0; padding: 80px 0 100px; text-align: center; color: var(--faint) }
svg { display: block; width: 100%; height: auto; overflow: visible }
.tick { font-size: 12px; fill: var(--soft); font-variant-numeric: tabular-nums } .name { fill: var(--faint) }
.grid { stroke: var(--grid) } .axis { stroke: var(--faint); stroke-opacity: .6 }
path { fill: none; stroke: var(--c); stroke-linejoin: round; stroke-linecap: round }
path.line { stroke-width: 2.2 } path.raw { stroke-width: 1; stroke-opacity: .38 }
.many path.raw { stroke-opacity: .2 }
path.band { fill: var(--c); fill-opacity: .11; stroke: none } path.target { stroke-width: 1.4; stroke-dasharray: 5 4 }
.own { --c: var(--target) }
circle, rect.lane { fill: var(--c) } rect.gate { fill: var(--gate) }
.cursor { stroke: var(--soft); stroke-width: 1; pointer-events: none } .cursor[hidden] { display: none }
.tip { position: absolute; z-index: 1; padding: 8px 12px; background: var(--card); border: 1px solid var(--rule);
  border-radius: 8px; box-shadow: 0 4px 18px #0002; font-size: 12.5px; line-height: 1.6; white-space: nowrap;
  pointer-events: none; font-variant-numeric: tabular-nums }
.tip b { float: right; margin-left: 18px; font-weight: 600 }
.samples { table-layout: fixed; min-width: 900px } .samples td { font-size: 13.5px }
.samples .problem { width: 26% } .samples .answer { width: 11% }
.text { max-height: 190px; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere }
.reply { font: 12.5px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
.mark { font-size: 12.5px; font-weight: 600; color: var(--soft) } .mark.good { color: var(--good) }
details { margin-top: 14px; background: var(--card); border: 1px solid var(--rule); border-radius: 10px }
summary { padding: 13px 20px; cursor: pointer; font-weight: 560 }
pre { margin: 0; padding: 4px 20px 20px; overflow-x: auto;
  font: 12.5px/1.6 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace }
footer { margin-top: 56px; font-size: 12.5px; color: var(--faint) }
@media (max-width: 640px) { main { padding: 32px 16px 64px } h1 { font-size: 26px } .tick { font-size: 15px } }
@media print { .card, figure, details { break-inside: avoid } }
"""

SCRIPT = """
for (const figure of document.querySelectorAll("figure.chart:not(.empty)")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip"; tip.hidden = true;
  const row = (name, value, colour) => {
    const div = document.createElement("div"), b = document.createElement("b");
    if (colour >= 0) {
      const dot = div.appendChild(document.createElement("span"));
      dot.className = "dot c" + colour;
    }
    div.append(name); b.textContent = value; div.append(b); return div;
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const x = (event.clientX - box.left) / scale;
    let i = 0;
    data.x.forEach((at, k) => { if (Math.abs(at - x) < Math.abs(data.x[i] - x)) i = k; });
    cursor.setAttribute("x1", data.x[i]); cursor.setAttribute("x2", data.x[i]);
    cursor.removeAttribute("hidden"); tip.hidden = false;
    tip.replaceChildren(row("step", data.steps[i], -1), ...data.rows.map((r) => row(r.name, r.values[i], r.colour)));
    const left = svg.offsetLeft || box.left - figure.getBoundingClientRect().left, at = left + data.x[i] * scale;
    tip.style.left = (data.x[i] * scale > box.width / 2 ? at - tip.offsetWidth - 12 : at + 12) + "px";
    tip.style.top = box.top - figure.getBoundingClientRect().top + 14 + "px";
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("hidden", ""); tip.hidden = true; });
}
"""
