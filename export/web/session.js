// Evaluated in a page without content by device.py.
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, int64: BigInt64Array,
  int32: Int32Array, int16: Int16Array, int8: Int8Array, uint64: BigUint64Array,
  uint32: Uint32Array, uint16: Uint16Array, uint8: Uint8Array, bool: Uint8Array,
}

// device.py sets the files, as browsers read them fastest: of a frame, and of the model to open.
const input = Object.assign(document.createElement("input"), {type: "file", multiple: true})

let ort
async function load() {
  const [script, wasm] = input.files
  ort = await import(URL.createObjectURL(script.slice(0, script.size, "text/javascript")))
  ort.env.wasm.numThreads = 1
  ort.env.wasm.wasmBinary = await wasm.arrayBuffer()
}

// Frames as in remote_session.py: the length of a JSON header, the header, the bytes of the arrays.
function unpack(frame) {
  let end = 4 + new DataView(frame).getUint32(0, true)
  const {arrays, ...header} = JSON.parse(new TextDecoder().decode(new Uint8Array(frame, 4, end - 4)))
  const tensors = arrays.map(([type, shape]) => {
    const begin = end, size = shape.reduce((a, b) => a * b, 1) * ARRAYS[type].BYTES_PER_ELEMENT
    end += size
    return new ort.Tensor(type, new ARRAYS[type](frame.slice(begin, end)), shape)
  })
  return [header, tensors]
}

function pack(header, tensors = []) {
  const arrays = tensors.map(t => [t.type, t.dims])
  const head = new TextEncoder().encode(JSON.stringify({...header, arrays}))
  const size = new DataView(new ArrayBuffer(4))
  size.setUint32(0, head.length, true)
  return new Blob([size, head, ...tensors.map(t => t.data)])
}

const sessions = {}
async function answer_frame(frame, ...models) {
  const [header, tensors] = unpack(await frame.arrayBuffer())
  const session = sessions[header.session]
  if (header.do === "run") {
    const feeds = Object.fromEntries(tensors.map((tensor, i) => [session.inputNames[i], tensor]))
    const found = await session.run(feeds)
    return pack({}, session.outputNames.map(name => found[name]))
  }
  if (session) await session.release()
  delete sessions[header.session]
  if (header.do === "open") {
    const files = await Promise.all(models.map(
      async file => ({path: file.name, data: new Uint8Array(await file.arrayBuffer())})))
    sessions[header.session] = await ort.InferenceSession.create(files[0].data, {
      executionProviders: ["wasm"], externalData: files.slice(1),
      graphOptimizationLevel: header.optimized ? "all" : "disabled",
    })
  }
  return pack({})
}

// Return the answer to the frame in the first file, in base64.
async function answer() {
  const failed = error => pack({error: String(error?.message ?? error)})
  const reply = await answer_frame(...input.files).catch(failed)
  return new Promise((resolve, reject) => {
    const reader = new FileReader()
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1))
    reader.onerror = () => reject(reader.error)
    reader.readAsDataURL(reply)
  })
}
