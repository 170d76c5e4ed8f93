"""An S3-compatible server on loopback, as a process of its own: prints its port, then serves."""

import sys
import threading

from moto.server import ThreadedMotoServer

if __name__ == "__main__":
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), server.stop())).start()
