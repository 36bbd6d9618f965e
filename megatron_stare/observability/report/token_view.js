// A view of responses by token: text reaches the page as textContent only, numbers as they stand in the rollout file.
// Gives what shows one response; its `why`, if it has one, says of a set of tokens in a word how a token came into it.
const tokenView = (view) => {
  const by = view.querySelector(".by"), line = view.querySelector(".run-of-tokens");
  const asked = view.querySelector(".asked"), ramp = view.querySelector(".ramp");
  const tip = view.appendChild(document.createElement("div"));
  tip.className = "tip"; tip.hidden = true;
  const units = { surprisal: "nats", entropy: "nats", advantage: "", weight: "times the advantage" };
  let colour = "surprisal", columns = {};

  const expand = (r) => ({ ...r, weight: r.weight.flatMap(([value, count]) => Array(count).fill(value)),
    advantage: r.text.map((_, i) => r.selected[i] === " " ? null : r.advantage) });
  const add = (parent, kind, text, name) => {
    const element = parent.appendChild(document.createElement(kind));
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };
  // the most of a colour under which text of either scheme has a contrast of 4.5
  const most = { heat: 72, plus: 45, minus: 45 };
  const tint = (share, hue) => `color-mix(in srgb, var(--${hue}) ${Math.round(Math.min(1, share) * most[hue])}%, transparent)`;
  const show = (value) => value === null || value === undefined ? "–" : String(value);

  // surprisal and entropy from 0, weight from the smallest there is, advantage to both sides of 0
  const scale = () => {
    const known = columns[colour].filter((value) => value !== null);
    const high = Math.max(...known, -Infinity), low = colour === "weight" ? Math.min(...known, Infinity) : 0;
    const far = Math.max(...known.map(Math.abs), 0);
    ramp.replaceChildren(colour + " ");
    const strip = (hue) => `linear-gradient(90deg, ${tint(0, hue)}, ${tint(1, hue)})`;
    if (!known.length) add(ramp, "span", "has no values here");
    else if (colour === "advantage") {
      const sign = known.some((value) => value < 0) ? "minus" : "plus";
      add(ramp, "span", far ? `${show(known[0])}, the same for every token of a response` : "0: nothing to learn from this response");
      if (far) add(ramp, "span", "", "bar").style.background = tint(1, sign);
    } else if (high === low) add(ramp, "span", `${show(low)} for every token`);
    else {
      add(ramp, "span", show(low)); add(ramp, "span", "", "bar").style.background = strip("heat");
      add(ramp, "span", `${show(high)} ${units[colour]}`);
    }
    return (value) => {
      if (value === null) return "";
      if (colour === "advantage") return far ? tint(Math.abs(value) / far, value < 0 ? "minus" : "plus") : "";
      return high > low ? tint((value - low) / (high - low), "heat") : "";
    };
  };
  const paint = () => {
    const shade = scale();
    [...line.children].forEach((span, i) => { span.style.background = shade(columns[colour][i]); });
    for (const button of by.children) button.setAttribute("aria-pressed", button.textContent === colour);
  };
  const open = (response) => {
    asked.textContent = response.answer ? `${response.prompt}\n(answer: ${response.answer})` : response.prompt;
    tip.hidden = true;
    view.classList.toggle("plain", !response.text);
    if (!response.text) { line.textContent = response.response; return; } // stored without the numbers of its tokens
    columns = expand(response);
    line.replaceChildren(...response.text.map((text, i) => {
      const span = document.createElement("span");
      span.textContent = text.replace(/\n/g, "↵\n") || "·";
      const chosen = { "+": "plus", "-": "minus", " ": "untrained" }[response.selected[i]];
      span.className = chosen || (response.rare[i] === "r" ? "rare" : "");
      span.dataset.token = i; span.tabIndex = i ? -1 : 0;
      return span;
    }));
    for (const each of view.querySelectorAll(".key i")) // of the marks, those that this response has
      each.parentElement.hidden = !line.querySelector(`.${each.className}`);
    paint();
  };
  const row = (name, value) => { const div = add(tip, "div", name); add(div, "b", value); };
  const point = (event) => {
    const i = event.target.dataset && event.target.dataset.token;
    if (i === undefined) { tip.hidden = true; return; }
    tip.replaceChildren();
    row(`token ${Number(i) + 1} of ${columns.text.length}`, JSON.stringify(columns.text[i]));
    for (const name of Object.keys(units)) row(units[name] ? `${name}, ${units[name]}` : name, show(columns[name][i]));
    const set = { "+": "L+", "-": "L−", "p": "U+", "m": "U−", ".": "neither L+ nor L−", " ": "not trained on" }[columns.selected[i]];
    row(set, { r: "rare at its position", c: "common at its position" }[columns.rare[i]] || "");
    const why = (columns.why || {})[columns.selected[i]];
    if (why) row("because", why);
    tip.hidden = false;
    const box = view.getBoundingClientRect(), at = event.target.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(at.left - box.left, box.width - tip.offsetWidth - 8)) + "px";
    tip.style.top = at.bottom - box.top + 8 + "px";
  };
  for (const name of Object.keys(units)) add(by, "button", name).onclick = () => { colour = name; paint(); };
  for (const kind of ["pointerover", "focusin", "click"]) line.addEventListener(kind, point);
  for (const kind of ["pointerleave", "focusout"]) line.addEventListener(kind, () => { tip.hidden = true; });
  line.addEventListener("keydown", (event) => { // Tab comes to the first token, arrows to the others
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = move && line.children[Number(event.target.dataset.token) + move];
    if (next) { event.preventDefault(); next.focus(); }
  });
  return open;
};
for (const view of document.querySelectorAll(".tokens")) {
  const select = view.querySelector("select");
  if (!select) continue; // whoever has it chosen elsewhere opens it
  const { responses } = JSON.parse(view.querySelector("script").textContent), open = tokenView(view);
  // those with selected tokens at first, where there are any and not all have some
  const all = responses.map((_, i) => i), chosen = all.filter((i) => /[-+pm]/.test(responses[i].selected));
  const label = view.querySelector(".which"), which = label.querySelector("select");
  label.hidden = !chosen.length || chosen.length === all.length;
  if (!label.hidden) which.add(new Option(`with selected tokens (${chosen.length})`, "chosen"));
  which.add(new Option(`all (${all.length})`, "all"));
  const list = () => {
    const shown = which.value === "all" ? all : chosen, before = Number(select.value || -1);
    select.replaceChildren(...shown.map((i) => new Option(responses[i].title, i)));
    select.value = shown.includes(before) ? before : shown[0];
    open(responses[select.value]);
  };
  which.onchange = list;
  select.onchange = () => open(responses[select.value]);
  list();
}
