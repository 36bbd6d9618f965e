// The list of sampled responses and the two or one that are shown. Only the list's index is read at the start; blocks of
// texts and of numbers are unpacked as they are wanted. Whatever a model wrote reaches the page as textContent.
const unpack = async (id) => {
  const packed = atob(document.getElementById(id).textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
};
const recent = new Map(), RECENT = 12;
const block = (id) => { // unpacked once, and forgotten when others were wanted since
  const found = recent.get(id) || unpack(id);
  recent.delete(id); recent.set(id, found);
  if (recent.size > RECENT) recent.delete(recent.keys().next().value);
  return found;
};
const list = document.querySelector(".list"), room = list.querySelector(".room"), form = document.querySelector(".filters");
const note = document.querySelector(".only-selected"), count = form.querySelector(".count"), sections = [...document.querySelectorAll(".one")];
const views = sections.map((section) => tokenView(section.querySelector(".tokens")));
const put = (parent, kind, text, name) => {
  const element = parent.appendChild(document.createElement(kind));
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
};
const number = (value, digits = 6) => value === null ? "–" : value.toLocaleString("en", { maximumSignificantDigits: digits });

unpack("index").then(({ runs, pairs }) => {
  const two = runs.length > 1, narrow = matchMedia("(max-width: 860px)");
  let height = 0, shown = [], chosen = null, asked = 0, words = null;

  const judged = runs.map((run) => !run.supervised); // rows of fine-tuning have no reward
  const rewardOf = (run, i) => {
    const reward = runs[run].rows.reward[i];
    return !judged[run] ? "" : reward === null ? "not verified" : `reward ${number(reward)}`;
  };
  const meta = (run, i) => {
    const rows = runs[run].rows, said = [];
    if (rows.tokens[i] !== null) said.push(`${number(rows.tokens[i])} tokens`);
    if (judged[run] && rows.plus[i] !== null) said.push(`L+ ${rows.plus[i]} · L− ${rows.minus[i]}`);
    return said.join(" · ");
  };
  const mark = (parent, run, i) => {
    const reward = runs[run].rows.reward[i];
    if (judged[run]) put(parent, "b", rewardOf(run, i), reward === null ? "bad" : reward > 0 ? "good" : "");
    if (meta(run, i)) parent.append(`${judged[run] ? " · " : ""}${meta(run, i)}`);
  };
  const draw = () => { // what is in sight, and a little more
    const first = Math.max(0, Math.floor(list.scrollTop / height) - 4);
    const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / height) + 4);
    const rows = [];
    for (let at = first; at < last; at++) {
      const pair = pairs[shown[at]], run = pair[0] < 0 ? 1 : 0, { rows: columns, prompts, tasks } = runs[run], i = pair[run];
      const row = document.createElement("div");
      row.className = "row"; row.style.height = `${height}px`; row.style.transform = `translateY(${at * height}px)`;
      row.setAttribute("role", "option"); row.id = `row-${shown[at]}`; row.dataset.pair = shown[at];
      row.setAttribute("aria-selected", String(shown[at] === chosen));
      row.setAttribute("aria-posinset", at + 1); row.setAttribute("aria-setsize", shown.length);
      put(row, "div", prompts[columns.prompt[i]]);
      if (!two) put(row, "div", columns.tail[i], "end");
      const line = put(row, "div", undefined, "meta");
      if (!two) {
        line.append(`step ${columns.step[i]} · `); mark(line, run, i);
        if (tasks.length > 1) line.append(` · ${tasks[columns.task[i]]}`);
      } else pair.forEach((place, which) => {
        const half = put(line, "span", undefined, "half");
        put(half, "span", undefined, `dot c${which}`);
        if (place < 0) { half.append("–"); return; }
        half.append(`step ${runs[which].rows.step[place]} · `); mark(half, which, place);
      });
      rows.push(row);
    }
    room.replaceChildren(...rows);
    if (!shown.length) put(room, "div", "no response matches", "empty-list");
    list.setAttribute("aria-activedescendant", chosen === null ? "" : `row-${chosen}`);
  };

  const fit = () => { // two runs beside each other take two lines, else there are three
    height = two && !narrow.matches ? 60 : 82;
    room.style.height = `${Math.max(1, shown.length) * height}px`;
  };

  const show = async (pair) => {
    chosen = pair; draw();
    const wanted = ++asked;
    const read = await Promise.all(pairs[pair].map(async (i, run) => {
      if (i < 0) return null;
      const rows = runs[run].rows, [part, place] = rows.at[i];
      const [texts, numbers] = await Promise.all([block(`texts-${run}-${part}`),
        rows.numbers[i] < 0 ? null : block(`numbers-${run}-${rows.numbers[i]}`)]);
      return { ...texts[place], ...(numbers && numbers[place]) };
    }));
    if (wanted !== asked) return; // another was chosen meanwhile
    read.forEach((response, run) => {
      sections[run].hidden = response === null;
      if (response === null) return;
      const { rows, reasons } = runs[run], i = pairs[pair][run], why = reasons[rows.step[i]];
      const facts = [`step ${rows.step[i]}`, rows.cursor[i] === null ? "" : `prompt ${rows.cursor[i]}`,
        rows.sample[i] === null ? "" : `sample ${rows.sample[i]}`, rewardOf(run, i), meta(run, i),
        response.status === "given_up" ? "given up: the outcome of a call of its environment is unknown"
          : response.status && !["ok", "pending"].includes(response.status) ? `verifier: ${response.status}` : "",
        response.finish ? `ended by ${response.finish}` : ""];
      sections[run].querySelector(".facts").textContent = facts.filter(Boolean).join(" · ");
      const training = rows.numbers[i] >= 0;
      const lines = training ? why.lines : rows.plus[i] === null ? ["Stored without per-token values."]
        : ["The per-token values did not fit on this page; they are in the rollout file."];
      sections[run].querySelector(".why").replaceChildren();
      if (judged[run]) for (const line of lines) put(sections[run].querySelector(".why"), "li", line);
      sections[run].querySelector(".calls").replaceChildren();
      for (const call of response.calls) {
        const one = put(sections[run].querySelector(".calls"), "details", undefined, call.failed ? "failed" : "");
        put(one, "summary", [`turn ${call.turn}`, call.name === null ? "not a call" : call.name, call.failed ? "failed" : "",
          `${number(call.seconds, 3)} s`, call.tokens ? `${number(call.tokens)} masked tokens` : ""].filter(Boolean).join(" · "));
        put(one, "pre", typeof call.asked === "string" ? call.asked : JSON.stringify(call.asked, null, 1));
        put(one, "pre", call.answer);
      }
      views[run]({ ...response, why: why.sets });
    });
  };

  const field = (name) => form.elements[name];
  const hasSelected = (run, i) => i >= 0 && runs[run].rows.numbers[i] >= 0 && runs[run].rows.selected[i];
  const bound = (name, none) => field(name).value === "" ? none : Number(field(name).value);
  const RANGES = ["step", "reward", "tokens"];
  const filter = async () => {
    const wanted = field("search").value.trim().toLowerCase();
    if (wanted && !words) { // all texts, once
      count.textContent = "reading all texts …";
      words = Promise.all(runs.map(async (run, which) => {
        const parts = [...new Set(run.rows.at.map(([part]) => part))];
        const texts = await Promise.all(parts.map((part) => unpack(`texts-${which}-${part}`)));
        const found = texts.map((part) => part.map((t) => `${t.prompt}\n${t.answer}\n${t.response}`.toLowerCase()));
        return run.rows.at.map(([part, place]) => found[part][place]);
      }));
    }
    const texts = wanted ? await words : null;
    if (wanted !== field("search").value.trim().toLowerCase()) return; // typed on meanwhile
    const ranges = RANGES.map((name) => [name, bound(`${name}-from`, null), bound(`${name}-to`, null)])
      .filter(([, from, to]) => from !== null || to !== null);
    const task = field("task").value, numbers = field("numbers").checked, unverified = field("unverified").checked;
    const selected = field("selected").checked;
    const both = two && field("both").checked, differ = two && field("differ").checked;
    const fits = (run, i) => {
      const rows = runs[run].rows;
      if (i < 0 || (numbers && rows.numbers[i] < 0) || (unverified && rows.reward[i] !== null)) return false;
      if (selected && !hasSelected(run, i)) return false;
      if (task && runs[run].tasks[rows.task[i]] !== task) return false;
      for (const [name, from, to] of ranges) {
        const value = rows[name][i];
        if (value === null || (from !== null && value < from) || (to !== null && value > to)) return false;
      }
      return !texts || texts[run][i].includes(wanted);
    };
    shown = [];
    for (let at = 0; at < pairs.length; at++) {
      const pair = pairs[at];
      if (both && pair.includes(-1)) continue;
      if (differ && (pair.includes(-1) || runs[0].rows.reward[pair[0]] === runs[1].rows.reward[pair[1]])) continue;
      if (pair.some((i, run) => fits(run, i))) shown.push(at);
    }
    const order = field("order").value, name = order.replace("-", ""), sign = order.startsWith("-") ? -1 : 1;
    const key = (at) => {
      const run = pairs[at][0] < 0 ? 1 : 0, value = runs[run].rows[name][pairs[at][run]];
      return value === null ? Infinity : sign * value; // what has none comes last
    };
    const keys = new Map(shown.map((at) => [at, key(at)]));
    shown.sort((a, b) => keys.get(a) - keys.get(b) || a - b);
    const of = two ? "pairs and single responses" : judged[0] ? "responses" : "rows";
    count.textContent = `${shown.length.toLocaleString("en")} of ${pairs.length.toLocaleString("en")} ${of}`;
    note.hidden = !selected;
    document.querySelector(".shown").hidden = !shown.length;
    fit();
    list.scrollTop = 0;
    draw();
    if (shown.length && !shown.includes(chosen)) await show(shown[0]);
  };

  let drawing = false, typing = 0;
  list.addEventListener("scroll", () => {
    if (!drawing) requestAnimationFrame(() => { drawing = false; draw(); });
    drawing = true;
  });
  list.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (row) show(Number(row.dataset.pair));
  });
  list.addEventListener("keydown", (event) => {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -Infinity, End: Infinity }[event.key];
    if (!move || !shown.length) return;
    event.preventDefault();
    const at = Math.min(shown.length - 1, Math.max(0, shown.indexOf(chosen) + move));
    if (at * height < list.scrollTop) list.scrollTop = at * height;
    else if ((at + 1) * height > list.scrollTop + list.clientHeight) list.scrollTop = (at + 1) * height - list.clientHeight;
    show(shown[at]);
  });
  form.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(filter, 120); });
  form.addEventListener("reset", () => { clearTimeout(typing); typing = setTimeout(filter, 0); });
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("resize", () => { fit(); draw(); });

  // at first those with selected tokens, where there are any; Clear lists all, as its button does
  const some = pairs.filter((pair) => pair.some((i, run) => hasSelected(run, i))).length;
  field("selected").parentElement.hidden = !some;
  field("selected").checked = some > 0;
  note.querySelector("button").addEventListener("click", () => { field("selected").checked = false; filter(); });
  note.querySelector("span").textContent = `, ${number(some)} of ${number(pairs.length)}`;

  const tasks = [...new Set(runs.flatMap((run) => run.tasks))];
  for (const task of tasks) field("task").add(new Option(task, task));
  form.querySelector(".reward").hidden = !judged.some(Boolean);
  form.querySelector(".task").hidden = tasks.length < 2;
  field("unverified").parentElement.hidden = !runs.some((run, i) => judged[i] && run.rows.reward.includes(null));
  if (two && !pairs.some((pair) => !pair.includes(-1))) field("both").checked = field("both").defaultChecked = false;
  return filter();
}).then(() => { document.body.dataset.ready = "yes"; }, (error) => { count.textContent = `this page cannot be read: ${error}`; throw error; });
