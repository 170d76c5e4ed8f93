-- wrk's script: sends the request in the file $LOAD_REQUEST (header lines, a blank line, the body),
-- and prints what was seen as JSON. With $LOAD_PAUSE_MS each connection waits so long on average
-- before its next request; the pauses are random, lest the connections send in step.

local file = assert(io.open(os.getenv("LOAD_REQUEST"), "rb"))
wrk.method = "POST"
for line in file:lines() do
   if line == "" then break end
   local name, value = line:match("^([^:]+): (.*)$")
   wrk.headers[name] = value
end
wrk.body = file:read("*a")
file:close()

local pause = tonumber(os.getenv("LOAD_PAUSE_MS"))
if pause then
   function delay() return math.floor(math.random() * (2 * pause + 1)) end
end

function done(summary, latency, _)
   local errors = 0
   for _, count in pairs(summary.errors) do errors = errors + count end
   io.write(string.format(
      '{"requests": %d, "seconds": %.6f, "errors": %d, "p50_ms": %.3f, "p99_ms": %.3f}\n',
      summary.requests, summary.duration / 1e6, errors,
      latency:percentile(50) / 1e3, latency:percentile(99) / 1e3))
end
