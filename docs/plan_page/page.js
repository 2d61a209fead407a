// The planner's page: a form, a worker that plans (worker.js), and the parts of its answer.
const at = (id) => document.getElementById("plan-" + id);
const LLAMA_405B = "--mesh plan --gradient_accumulation_steps auto --train_micro_batch_size_per_gpu auto" +
  " --model.hidden_size 16384 --model.num_hidden_layers 126 --model.num_attention_heads 128" +
  " --model.intermediate_size 53248 --train_batch_size 2048";
const SHOWN = ["table", "parts", "why", "drawing"];
let worker, configs, began, clock;

function say(text) { at("status").textContent = text; }
function seconds() { return ((performance.now() - began) / 1000).toFixed(1); }
function tick(doing) {
  began = performance.now();
  clearInterval(clock);
  const show = () => say(`${doing}: ${seconds()} s`);
  show();
  clock = setInterval(show, 200);
}

async function start() {
  if (!self.planFiles) {
    at("status").innerHTML = "The planner is not in this copy of the site. Run " +
      "<code>python docs/plan_page/build.py && mkdocs build</code> (it needs npm and pip), and open the page again.";
    return;
  }
  tick("loading Python");
  const files = {};
  for (const [name, text] of Object.entries(self.planFiles)) {
    files[name] = new Uint8Array(await (await fetch("data:;base64," + text)).arrayBuffer());
  }
  const source = new Blob([files["worker.js"]], {type: "text/javascript"});
  worker = new Worker(URL.createObjectURL(source));
  worker.onmessage = ({data}) => receive(data.part, data.text);
  worker.onerror = (event) => receive("error", event.message);
  worker.postMessage({files}, Object.values(files).map((file) => file.buffer));
}

function receive(part, text) {
  if (part === "ready") return ready(JSON.parse(text));
  if (part === "json") return void (self.planJson = text);
  if (part === "done" || part === "error") {
    clearInterval(clock);
    at("go").disabled = !configs;
    at("stop").hidden = true;
    say(part === "error" ? text : `planned in ${seconds()} s, all in this page`);
    at("status").dataset.state = part;
    return;
  }
  at(part).innerHTML = part === "drawing" ? text : `<pre>${text}</pre>`;
  at(part).parentElement.hidden = false;
}

function ready(choices) {
  clearInterval(clock);
  say(`loaded in ${seconds()} s`);
  at("go").disabled = false;
  at("status").dataset.state = "ready";
  if (configs) return;  // a search was stopped
  configs = choices.configs;
  for (const name in configs) at("model").add(new Option(name));
  at("model").add(new Option("llama-405b (llama-70b at its sizes)", "405b"));
  at("model").add(new Option("a config of your own", ""));
  for (const name of choices.hardware) at("hardware").add(new Option(name));
  at("model").value = "gpt2-124m";
  at("hardware").value = "A100-SXM4-80GB";
  pick();
}

function pick() {
  const name = at("model").value;
  at("config").value = configs[name === "405b" ? "llama-70b" : name] ?? "";
  at("words").value = name === "405b" ? LLAMA_405B : "";
  if (!name) at("text").open = true;
}

function plan() {
  for (const part of SHOWN) at(part).parentElement.hidden = true;
  at("go").disabled = true;
  at("stop").hidden = false;
  at("status").dataset.state = "planning";
  tick("searching");
  const columns = Math.floor(at("form").clientWidth / at("ruler").getBoundingClientRect().width * 10) - 2;
  worker.postMessage({
    config: at("config").value, mesh: at("mesh").value.trim(), width: Math.max(40, Math.min(columns, 160)),
    words: `--hardware ${at("hardware").value} --devices ${at("devices").value || 1} ${at("words").value}`,
  });
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); plan(); });
at("model").addEventListener("change", pick);
at("config").addEventListener("input", () => { at("model").value = ""; });
at("stop").addEventListener("click", () => { worker.terminate(); at("stop").hidden = true; start(); });
start();
