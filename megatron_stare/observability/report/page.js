for (const figure of document.querySelectorAll("figure.chart:not(.empty)")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), cursor = svg.querySelector(".cursor");
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip"; tip.hidden = true;
  const row = (name, value, colour) => {
    const div = document.createElement("div"), b = document.createElement("b");
    if (colour) {
      const dot = div.appendChild(document.createElement("span"));
      dot.className = "dot " + colour;
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
    tip.replaceChildren(row("step", data.steps[i], ""), ...data.rows.map((r) => row(r.name, r.values[i], r.css)));
    const left = svg.offsetLeft || box.left - figure.getBoundingClientRect().left, at = left + data.x[i] * scale;
    const beside = data.x[i] * scale > box.width / 2 ? at - tip.offsetWidth - 12 : at + 12;
    tip.style.left = Math.max(4, Math.min(beside, figure.clientWidth - tip.offsetWidth - 4)) + "px";
    tip.style.top = box.top - figure.getBoundingClientRect().top + 14 + "px";
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("hidden", ""); tip.hidden = true; });
}
// a link of the contents unfolds what it names; paper shows all
const folded = [...document.querySelectorAll("details")];
const unfold = () => {
  const wanted = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (wanted && wanted.tagName === "DETAILS") { wanted.open = true; wanted.scrollIntoView(); }
};
addEventListener("hashchange", unfold);
for (const link of document.querySelectorAll(".contents a")) link.addEventListener("click", () => setTimeout(unfold, 0));
unfold();
const all = document.querySelector(".unfold");
all.hidden = false;
all.onclick = () => {
  const open = all.textContent === "Unfold all";
  for (const each of document.querySelectorAll(".part")) each.open = open;
  all.textContent = open ? "Fold all" : "Unfold all";
};
let closed = [];
addEventListener("beforeprint", () => { closed = folded.filter((each) => !each.open); for (const each of closed) each.open = true; });
addEventListener("afterprint", () => { for (const each of closed) each.open = false; closed = []; });
