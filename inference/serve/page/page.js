// The chat page: streams answers, colours each token by how it came, and compares drafting with plain decoding.

const $ = (id) => document.getElementById(id);
const IDEAS = [
  "Why is the sky blue?",
  "Write a Python function that checks whether a word is a palindrome.",
  "Explain to a child how bees make honey.",
  "List five tips for learning a language.",
];
const BEGINNINGS = ["Once upon a time there was a lighthouse keeper who", "def is_palindrome(text):", "The sky is blue because"];
const SHADES = 7; // deeper drafts share the last one, as the legend in index.html says
const COMPARED = 96; // tokens of each text side by side, at most
const ALTERNATIVES = 5;
const ROUNDING = { float32: 0.01, bfloat16: 0.5, float16: 0.1 }; // generous bounds on what it does to logits

const state = { model: null, turns: [], steps: [], shown: -1, follow: true, running: null, mode: "chat", pictures: [] };

// ---- asking the server ------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function failure(answer) {
  const found = await answer.json().catch(() => null);
  const message = found?.error?.message ?? `the server answered ${answer.status}`;
  return answer.status === 401 ? `${message} Enter it under Settings.` : message;
}

async function* events(body, signal) {
  const chat = state.model.headstart.chat_template;
  const answer = await fetch(chat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (!answer.ok) throw new Error(await failure(answer));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function request(turns, options) {
  const chat = state.model.headstart.chat_template;
  const prompt = chat ? { messages: turns } : { prompt: turns.at(-1).content };
  const seed = options.seed ?? ($("seed").value === "" ? null : Number($("seed").value));
  const logprobs = chat ? { logprobs: true, top_logprobs: ALTERNATIVES } : { logprobs: ALTERNATIVES };
  return {
    model: state.model.id, ...prompt, stream: true, temperature: Number($("temperature").value),
    max_tokens: options.most, speculative: options.drafts, headstart: { tokens: true, trees: options.drafts },
    ...(seed === null ? {} : { seed }), ...(options.logprobs ? logprobs : {}),
  };
}

// ---- one answer as it grows -------------------------------------------------------------------------------------

class Writing {
  constructor(element) {
    this.element = element;
    this.steps = []; // {tokens: [{text, depth}], tree, spans}
    this.text = "";
    this.logprobs = [];
    this.first = null; // seconds until the first token
    this.seconds = null;
    this.count = 0; // tokens so far
    this.finish = null;
    this.metrics = null;
  }

  add(event) {
    this.metrics = event.metrics ?? this.metrics;
    const choice = event.choices[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const told = choice.logprobs;
    if (told?.content) this.logprobs.push(...told.content.map((each) => ({ ...each, top: each.top_logprobs })));
    if (told?.tokens) this.logprobs.push(...told.tokens.map((token, place) => ({
      token, logprob: told.token_logprobs[place],
      top: Object.entries(told.top_logprobs?.[place] ?? {}).map(([text, logprob]) => ({ token: text, logprob })),
    })));
    const own = choice.headstart;
    if (!own) return;
    if (own.count === 0) return this.appendRest(own.tokens);
    this.seconds = own.seconds;
    this.first ??= own.seconds;
    this.count += own.count;
    this.firstCount ??= own.count;
    this.steps.push({ tokens: own.tokens, tree: own.tree ?? null, count: own.count, spans: [] });
    this.appendRest(own.tokens);
  }

  // Tokens of the last step, or the text that was held back until the end.
  appendRest(tokens) {
    const step = this.steps.at(-1);
    for (const token of tokens) {
      const span = document.createElement("span");
      span.className = `t ${shade(token.depth)}`;
      span.textContent = token.text;
      span.dataset.step = this.steps.length - 1;
      step?.spans.push(span);
      this.text += token.text;
      this.element.append(span);
    }
  }

  get rate() {
    const passes = this.steps.length - 1;
    return passes > 0 && this.seconds > this.first ? (this.count - this.firstCount) / (this.seconds - this.first) : null;
  }

  get length() {
    const passes = this.steps.length - 1;
    return passes > 0 ? (this.count - this.firstCount) / passes : null;
  }
}

function shade(depth) {
  if (depth === null) return "";
  return depth === 0 ? "bonus" : `d${Math.min(depth, SHADES)}`;
}

async function write(writing, turns, options, signal, grown) {
  writing.element.classList.add("cursor");
  try {
    for await (const event of events(request(turns, options), signal)) {
      writing.add(event);
      grown();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
  } finally {
    writing.element.classList.remove("cursor");
  }
}

// ---- the conversation -------------------------------------------------------------------------------------------

function make(tag, kind, text = "") {
  const element = document.createElement(tag);
  element.className = kind;
  element.textContent = text;
  return element;
}

// Pictures that the next message shows, as data URLs.
function addPictures(files) {
  if (!state.model?.headstart.images) return;
  for (const file of [...files].filter((each) => each.type.startsWith("image/"))) {
    const reader = new FileReader();
    reader.addEventListener("load", () => { state.pictures.push(reader.result); showPictures(); });
    reader.readAsDataURL(file);
  }
}

function shownPicture(url) {
  return Object.assign(document.createElement("img"), { src: url, alt: "picture of this message" });
}

function showPictures() {
  $("pictures").replaceChildren(...state.pictures.map((url, place) => {
    const image = Object.assign(shownPicture(url), { title: "Remove this picture" });
    image.addEventListener("click", () => { state.pictures.splice(place, 1); showPictures(); });
    return image;
  }));
}

function message(question, pictures) {
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: parts.length ? [...parts, { type: "text", text: question }] : question };
}

async function ask(question, pictures) {
  $("hero").hidden = true;
  $("talk").hidden = false;
  const answer = make("div", "turn");
  const text = make("div", $("colours").checked ? "text coloured" : "text");
  answer.append(text);
  const mine = make("div", "turn mine", question);
  mine.prepend(...pictures.map(shownPicture));
  $("talk").append(mine, answer);
  const writing = new Writing(text);
  const drafts = $("drafts").checked;
  text.writing = writing;
  showRail(true);
  follow(writing);
  const turns = [...state.turns, message(question, pictures)];
  try {
    await write(writing, turns, { drafts, most: Number($("most").value) || 400 }, state.running.signal, () => {
      const near = $("main").scrollHeight - $("main").scrollTop - $("main").clientHeight < 120;
      if (state.steps === writing.steps) showProgress(writing);
      if (near) $("main").scrollTop = $("main").scrollHeight;
    });
    state.turns = [...turns, { role: "assistant", content: writing.text }];
    answer.append(summary(writing, drafts));
    $("main").scrollTop = $("main").scrollHeight;
    say(`The answer is complete: ${writing.count} tokens.`);
  } catch (error) {
    answer.append(make("p", "notice", error.message));
    say(`The server refused: ${error.message}`);
  }
}

function summary(writing, drafts) {
  const line = make("p", "after");
  const figure = (value, what) => {
    const part = document.createElement("span");
    part.append(make("b", "", value), ` ${what}`);
    line.append(part);
  };
  figure(String(writing.count), "tokens");
  if (writing.length !== null) figure(writing.length.toFixed(2), drafts ? "tokens per pass of the model" : "token per pass, no drafts");
  if (writing.rate !== null) figure(writing.rate.toFixed(1), "tokens/s");
  if (writing.finish === "length") figure("cut off", "at the longest answer that Settings allow");
  if (writing.finish === null) figure("stopped", "");
  return line;
}

// ---- the rail: speed, acceptance, the tree of a step ------------------------------------------------------------

function showRail(visible) {
  $("rail").hidden = !visible;
  document.body.classList.toggle("with-rail", visible);
}

function follow(writing) {
  Object.assign(state, { steps: writing.steps, follow: true, shown: -1 });
  $("speed").textContent = $("length").textContent = "–";
  $("pulse").replaceChildren();
  $("tree").replaceChildren();
  $("step").textContent = "–";
}

function showProgress(writing) {
  if (writing.rate !== null) $("speed").textContent = writing.rate.toFixed(writing.rate < 100 ? 1 : 0);
  if (writing.length !== null) $("length").textContent = writing.length.toFixed(2);
  drawPulse(writing.steps);
  if (state.follow && writing.steps.length > 1) showStep(writing.steps.length - 1);
}

function svg(tag, attributes, ...inside) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...inside);
  return element;
}

function drawPulse(steps) {
  const last = steps.slice(1).slice(-40);
  const most = Math.max(4, ...last.map((step) => step.count));
  $("pulse").replaceChildren(...last.map((step, place) => {
    const height = Math.max(2, (step.count / most) * 42);
    const kind = step.count < 2 ? "low" : place === last.length - 1 ? "now" : "";
    return svg("rect", { x: place * 6, y: 44 - height, width: 4.4, height, rx: 1.4, class: kind });
  }));
}

function showStep(number) {
  const steps = state.steps;
  if (!(number in steps)) return;
  for (const step of steps) for (const span of step.spans) span.classList.remove("chosen");
  state.shown = number;
  if (!state.follow) for (const span of steps[number].spans) span.classList.add("chosen");
  $("step").textContent = `step ${number} of ${steps.length - 1}`;
  $("earlier").disabled = number <= 0;
  $("later").disabled = number >= steps.length - 1;
  const { tree, tokens } = steps[number];
  $("tree").replaceChildren(tree ? drawTree(tree, tokens) : make("p", "hint", number === 0
    ? "The first token comes with reading the prompt; nothing was drafted for it."
    : "Nothing was drafted in this step."));
}

function drawTree(tree, tokens) {
  const texts = tree.texts.map(visible), parents = [...tree.parents], taken = new Set(tree.path);
  const bonus = tokens.at(-1)?.depth === 0 ? texts.length : -1;
  if (bonus >= 0) {
    texts.push(visible(tokens.at(-1).text));
    parents.push(tree.path.at(-1));
  }
  const depths = [], children = texts.map(() => []);
  parents.forEach((parent, node) => {
    depths[node] = parent < 0 ? 0 : depths[parent] + 1;
    if (parent >= 0) children[parent].push(node);
  });
  const first = (node) => (taken.has(node) || node === bonus ? 0 : 1);
  const rows = [];
  let leaves = 0;
  const place = (node) => {
    const own = [...children[node]].sort((a, b) => first(a) - first(b) || a - b);
    if (!own.length) rows[node] = leaves++;
    own.forEach(place);
    if (own.length) rows[node] = rows[own[0]];
  };
  place(0);
  const widths = [];
  texts.forEach((text, node) => {
    widths[depths[node]] = Math.max(widths[depths[node]] ?? 0, boxWidth(text));
  });
  const left = widths.map((_, depth) => widths.slice(0, depth).reduce((sum, each) => sum + each + 24, 1));
  const middle = (node) => rows[node] * 30 + 15;
  const width = left.at(-1) + widths.at(-1) + 2, height = leaves * 30;
  const style = `width: max(100%, ${width * 0.6}px); max-width: ${width}px`; // narrower, then scrolled
  const drawing = svg("svg", { style, viewBox: `0 0 ${width} ${height}`, role: "img" });
  drawing.append(svg("title", {}, described(tree, tokens)));
  const edges = parents.map((parent, node) => ({ parent, node })).filter(({ parent }) => parent >= 0);
  edges.sort((a, b) => first(b.node) - first(a.node));
  for (const { parent, node } of edges) {
    const x = left[depths[parent]] + boxWidth(texts[parent]), y = middle(parent);
    const end = left[depths[node]], to = middle(node), turn = (x + end) / 2;
    const path = `M${x} ${y}C${turn} ${y} ${turn} ${to} ${end} ${to}`;
    drawing.append(svg("path", { d: path, class: first(node) ? "" : "taken" }));
  }
  texts.forEach((text, node) => {
    const kind = node === bonus ? "bonus" : node === 0 ? "root" : taken.has(node) ? "taken" : "";
    const box = { x: left[depths[node]], y: middle(node) - 12, width: boxWidth(text), height: 24, rx: 7 };
    drawing.append(svg("g", { class: kind }, svg("rect", box), svg("text", { x: box.x + 8, y: middle(node) + 4.5 }, text)));
  });
  return drawing;
}

function boxWidth(text) {
  return [...text].reduce((sum, letter) => sum + (letter < "\u1100" ? 7.8 : 13), 16); // wide from Hangul on
}

function visible(text) {
  const shown = text.replace(/ {3,}/g, (run) => `·×${run.length}`).replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
  return [...shown].length > 14 ? `${[...shown].slice(0, 13).join("")}…` : shown;
}

function described(tree, tokens) {
  const accepted = tree.path.length - 1;
  return `${tree.texts.length - 1} draft tokens, ${accepted} accepted, ${tokens.length} tokens added`;
}

function pick(event) {
  const span = event.target.closest?.(".coloured .t[data-step]");
  const writing = span?.closest(".text").writing;
  if (!writing?.steps.length) return;
  if (writing.steps !== state.steps) follow(writing);
  state.follow = false;
  $("rail").classList.add("open");
  showProgress(writing);
  showStep(Number(span.dataset.step));
}

// ---- side by side -----------------------------------------------------------------------------------------------

async function compare(question, pictures) {
  showCompare();
  $("asked").replaceChildren(...pictures.map(shownPicture), question);
  const turns = [message(question, pictures)];
  const seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value);
  const most = Math.min(Number($("most").value) || COMPARED, COMPARED);
  verdict("Writing with drafts …", "The same prompt and seed run twice, one after the other, so that each has the machine to itself.");
  const found = {};
  try {
    for (const side of ["with", "plain"]) {
      const text = $(`${side}-text`);
      if (side === "plain") verdict("Now without drafts …", "One token for each pass of the model.");
      found[side] = text.writing = new Writing(text);
      const show = () => showSide(side, found[side], most);
      await write(found[side], turns, { drafts: side === "with", most, seed, logprobs: true }, state.running.signal, show);
      show();
      if (state.running.signal.aborted) return verdict("Stopped", "");
    }
    judge(found.with, found.plain);
  } catch (error) {
    verdict("The server refused", error.message, true);
  }
}

function showCompare() {
  $("hero").hidden = true;
  $("compare").hidden = false;
  for (const side of ["with", "plain"]) {
    $(`${side}-text`).replaceChildren();
    $(`${side}-text`).className = side === "with" && $("colours").checked ? "text coloured" : "text";
    $(`${side}-figures`).textContent = "";
    $(`${side}-meter`).style.width = "0";
  }
}

function showSide(side, writing, most) {
  const line = $(`${side}-figures`);
  const rate = writing.rate === null ? "–" : writing.rate.toFixed(1);
  line.replaceChildren(make("b", "", rate), " tokens/s · ", make("b", "", String(Math.max(writing.steps.length - 1, 0))), " passes");
  const done = writing.finish !== null;
  $(`${side}-meter`).style.width = `${done ? 100 : Math.min(100, (writing.count / most) * 100)}%`;
}

function verdict(title, text, parts = false) {
  const paragraph = document.createElement("p");
  paragraph.append(...[].concat(text));
  $("verdict").className = parts ? "verdict parts" : "verdict";
  $("verdict").replaceChildren(make("h2", "", title), paragraph);
}

function judge(drafted, plain) {
  const passes = `${drafted.steps.length - 1} passes of the model in place of ${plain.steps.length - 1}.`;
  const one = drafted.logprobs, other = plain.logprobs;
  let at = 0;
  while (at < one.length && at < other.length && one[at].token === other[at].token) at += 1;
  if (drafted.text === plain.text && drafted.count === plain.count) {
    verdict(`The two texts are equal, all ${drafted.count} tokens of them`, passes);
    return say(`The texts are equal. ${passes}`);
  }
  const spans = [drafted, plain].map((writing) => writing.steps.flatMap((step) => step.spans));
  const same = spans[0].findIndex((span, place) => span.textContent !== spans[1][place]?.textContent);
  for (const own of spans) mark(own.slice(same < 0 ? spans[0].length : same));
  const note = margin(one[at], other[at]);
  verdict(`The same text up to token ${at + 1}`, [...note, passes], true);
  say(`The texts part at token ${at + 1}.`);
}

// Both texts so far are the same, so each token's own logprob will do if the other text does not tell it.
function margin(one, other) {
  if (!one && !other) return ["They part within a character that several tokens spell. "];
  if (!one || !other) return ["One text ends where the other goes on. "];
  const rival = other.top.find((each) => each.token === one.token) ?? one;
  const dtype = state.model.headstart.dtype;
  const gap = Math.abs(other.logprob - rival.logprob), isGreedy = Number($("temperature").value) === 0;
  const why = isGreedy ? "so little" : "and the random numbers of the seed bring them so close";
  const after = isGreedy && gap > ROUNDING[dtype]
    ? `: more than rounding in ${dtype} explains, so something is wrong. `
    : `, ${why} that rounding in ${dtype} decides, as a pass over a tree adds numbers up in another order. In float32 the texts are equal. `;
  const told = `. Their logits differ by ${gap.toFixed(3)}${after}`;
  return ["With drafts ", make("b", "", visible(one.token)), ", plainly ", make("b", "", visible(other.token)), told];
}

function mark(spans) {
  spans[0]?.classList.add("parted");
  for (const span of spans) span.classList.add("after-part");
}

// ---- the page ---------------------------------------------------------------------------------------------------

function say(text) {
  $("status").textContent = text;
}

function placeholder() {
  if (state.mode === "compare") return "Ask something, with drafts and without";
  return state.model?.headstart.chat_template === false ? "Begin a text, and the model goes on" : "Ask something";
}

function setMode(mode) {
  state.mode = mode;
  $("mode-chat").setAttribute("aria-pressed", String(mode === "chat"));
  $("mode-compare").setAttribute("aria-pressed", String(mode === "compare"));
  const talked = $("talk").childElementCount > 0, compared = $("verdict").childElementCount > 0;
  $("talk").hidden = mode !== "chat" || !talked;
  $("compare").hidden = mode !== "compare" || !compared;
  $("hero").hidden = mode === "chat" ? talked : compared;
  showRail(mode === "chat" && talked);
  $("question").placeholder = placeholder();
  $("question").focus();
}

async function submit(event) {
  event?.preventDefault();
  if (state.running) return state.running.abort();
  const question = $("question").value.trim();
  if (!(question || state.pictures.length) || !state.model) return;
  const pictures = state.pictures.splice(0);
  showPictures();
  $("question").value = "";
  fit();
  state.running = new AbortController();
  $("composer").classList.add("busy");
  $("send").setAttribute("aria-label", "Stop");
  try {
    await (state.mode === "chat" ? ask : compare)(question, pictures);
  } finally {
    state.running = null;
    $("composer").classList.remove("busy");
    $("send").setAttribute("aria-label", "Send");
    $("question").focus();
  }
}

function fit() {
  const field = $("question");
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

function begin() {
  state.running?.abort();
  state.turns = [];
  $("talk").replaceChildren();
  $("settings").close();
  setMode("chat");
}

async function meet() {
  try {
    const answer = await fetch("/v1/models", { headers: headers() });
    if (!answer.ok) throw new Error(await failure(answer));
    state.model = (await answer.json()).data[0];
    const { drafter, head, dtype, device, chat_template: chat } = state.model.headstart;
    const drafts = head ? `drafts by its ${drafter}` : `drafts by ${drafter.replaceAll("_", " ")}`;
    $("about").textContent = `${state.model.id} · ${drafts} · ${dtype} on ${device}`;
    $("attach").hidden = !state.model.headstart.images;
    if (!chat) $("question").placeholder = placeholder();
    $("ideas").replaceChildren(...(chat ? IDEAS : BEGINNINGS).map(card));
  } catch (error) {
    $("about").textContent = error.message;
  }
}

function card(idea) {
  const entry = document.createElement("li");
  const button = make("button", "", idea);
  button.type = "button";
  button.addEventListener("click", () => {
    $("question").value = idea;
    submit();
  });
  entry.append(button);
  return entry;
}

$("key").value = sessionStorage.getItem("key") ?? "";
$("composer").addEventListener("submit", submit);
$("question").addEventListener("input", fit);
$("question").addEventListener("paste", (event) => addPictures(event.clipboardData.files));
$("picture").addEventListener("change", () => { addPictures($("picture").files); $("picture").value = ""; });
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => { event.preventDefault(); addPictures(event.dataTransfer.files); });
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
$("mode-chat").addEventListener("click", () => setMode("chat"));
$("mode-compare").addEventListener("click", () => setMode("compare"));
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("close", () => {
  sessionStorage.setItem("key", $("key").value);
  meet();
});
$("temperature").addEventListener("input", () => { $("temperature-shown").value = $("temperature").value; });
$("colours").addEventListener("change", () => {
  for (const text of document.querySelectorAll(".talk .text, #with-text")) text.classList.toggle("coloured", $("colours").checked);
});
$("fresh").addEventListener("click", begin);
$("talk").addEventListener("mouseover", pick);
$("talk").addEventListener("click", pick);
$("earlier").addEventListener("click", () => { state.follow = false; showStep(state.shown - 1); });
$("later").addEventListener("click", () => { state.follow = false; showStep(state.shown + 1); });
$("rail").addEventListener("click", (event) => {
  if (!event.target.closest("button, .tree")) $("rail").classList.toggle("open");
});
meet();
