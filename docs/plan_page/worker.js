// The planner in a worker, so that the page stays alive. All files come in the first message.
const nowhere = "https://bundle.invalid/";  // requests are answered from the files, or fail
let python, files;

async function start(given) {
  files = given;
  self.fetch = async (address) => {
    const name = String(address.url ?? address).replace(nowhere, "");
    if (!(name in files)) throw new Error(`${name}: is not in the bundle`);
    const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
    return new Response(files[name], {headers: {"Content-Type": type}});
  };
  // From a folder without a server only a classic worker starts; Pyodide asks for a module worker,
  // for its imports, which a classic worker has as well.
  self.importScripts = () => { throw new Error("unused"); };
  const load = (name) => import(URL.createObjectURL(new Blob([files[name]], {type: "text/javascript"})));
  const [{loadPyodide}, runtime] = await Promise.all([load("pyodide.mjs"), load("pyodide.asm.mjs")]);
  python = await loadPyodide({
    indexURL: nowhere, createPyodideModule: runtime.default,
    lockFileContents: new TextDecoder().decode(files["pyodide-lock.json"]),
  });
  for (const name in files) if (name.endsWith(".whl")) python.unpackArchive(files[name], "wheel");
  python.unpackArchive(files["parallel3d.zip"], "zip");
  const answer = python.pyimport("answer");
  postMessage({part: "ready", text: answer.choices()});
}

self.onmessage = async ({data}) => {
  try {
    if (data.files) return await start(data.files);
    const {config, words, mesh, width} = data;
    python.pyimport("answer").answer(config, words, mesh, width, (part, text) => postMessage({part, text}));
    postMessage({part: "done", text: ""});
  } catch (error) {
    postMessage({part: "error", text: String(error.message ?? error)});
  }
};
