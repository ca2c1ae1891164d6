import sys

from stoker.bench.offload import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
