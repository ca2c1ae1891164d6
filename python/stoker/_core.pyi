"""The compiled core, as Python sees it: bindings/base.cc, memory.cc, store.cc, offload.cc and
optim.cc, in this order.

Addresses are integers (``tensor.data_ptr()``); whoever passes one keeps the memory alive and still
until the returned Future or job is done. Every call that moves bytes or waits releases the GIL, and
every wait can be interrupted by Ctrl-C. Errors are raised as the classes of ``stoker.errors``.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import Any

Priority = str  # "demand" | "prefetch" | "write_back" | "checkpoint" | "scrub"

__version__: str

def parse_bytes(text: str) -> int: ...  # "20GiB", "160 MiB", "4096"; InvalidArgument
def leave() -> None: ...  # the interpreter is about to end: threads in the core stay there
def parked_threads() -> list[int]: ...  # that stay there since leave()
def crc32c(address: int, bytes: int, seed: int = 0) -> int: ...  # seed: the CRC of the bytes before
def xxh3_128(address: int, bytes: int) -> bytes: ...  # 16 bytes, the canonical (big-endian) form
def reduce(address: int, bytes: int, into: int) -> tuple[int, int]: ...  # stored bytes, width
def expand(address: int, stored: int, width: int, into: int, bytes: int) -> None: ...
def human_bytes(bytes: int) -> str: ...  # "1.5 GiB"

class Permutation:
    """An invertible permutation of [0, count), keyed by (seed, epoch): see base/order.h."""

    def __init__(self, count: int, seed: int, epoch: int) -> None: ...  # ValueError: count < 1
    def __len__(self) -> int: ...
    def sample(self, position: int) -> int: ...  # IndexError outside [0, count)
    def position(self, sample: int) -> int: ...  # the inverse
    def samples(self, positions: Any) -> Any: ...  # of a uint64 array, as one

class Mixture:
    """Which source each position of an endless sequence draws from: see base/order.h."""

    def __init__(self, weights: list[float], seed: int) -> None: ...  # InvalidArgument
    @property
    def counts(self) -> list[int]: ...  # draws of each source in a cycle of 65,536
    def draw(self, position: int) -> tuple[int, int]: ...  # source, number of its draw
    def position(self, source: int, number: int) -> int: ...  # the inverse
    def draws(self, first: int, last: int) -> Any: ...  # uint64 array [last - first, 2]

class Sequence:
    """Which sample of which source stands at each position, over all epochs: data/sequence.h."""

    @staticmethod
    def in_order(count: int) -> Sequence: ...  # ValueError: count < 1
    @staticmethod
    def shuffled(count: int, seed: int) -> Sequence: ...
    # shape: samples, of a run, of a window, lanes, of a batch (base/order.h: WindowShape)
    @staticmethod
    def windowed(shape: tuple[int, int, int, int, int], seed: int) -> Sequence: ...
    @staticmethod
    def mixed(counts: list[int], weights: list[float], seed: int) -> Sequence: ...
    @property
    def count(self) -> int | None: ...  # samples of an epoch; None of a mixture
    def picks(self, first: int, last: int) -> tuple[Any, Any]: ...  # sources, samples: uint64 [n]

class SampleTable:
    """Where the bytes of each sample of a source lie: data/sample_table.h."""

    # runs: uint64 [n, 3] of object, samples, offset of the first
    @staticmethod
    def equal(keys: list[str], runs: Any, stride: int, bytes: int) -> SampleTable: ...
    # runs: object, samples, offset of the first row of each array; row_bytes: of each array
    @staticmethod
    def rows(
        keys: list[str], runs: list[tuple[int, int, list[int]]], row_bytes: list[int]
    ) -> SampleTable: ...
    # Sample i has parts [starts[i], starts[i + 1]) of objects (uint32), offsets, bytes (uint64) and
    # crcs (uint32). The arrays are used where they are. record: once it is read, the one
    # part of each sample is split into columns of so many bytes (0: the sample says): record.h.
    @staticmethod
    def ranges(
        keys: list[str],
        object_bytes: list[int],
        starts: Any,
        objects: Any,
        offsets: Any,
        bytes: Any,
        crcs: Any | None = None,
        record: list[int] = [],
        packed: list[tuple[str, int]] = [],  # of each object: "", "gz" or "zstd", and stored bytes
    ) -> SampleTable: ...
    def key(self, object: int) -> str: ...  # of the object with this number
    def __len__(self) -> int: ...
    @property
    def keys(self) -> list[str]: ...
    @property
    def apart(self) -> bool: ...  # each object has one part: no two are worth one read
    def plan(self) -> Any: ...  # uint64 [n, 5], for Store.follow()

class Batch:
    """A batch that is read, or was. What follows wait() is a ValueError before it is there."""

    def ready(self) -> bool: ...
    def wait(self) -> None: ...  # raises what became of it
    def __len__(self) -> int: ...  # samples
    @property
    def memory(self) -> Any: ...  # uint8 array [bytes]; no copy, lives as long as anything of it
    @property
    def picks(self) -> tuple[Any, Any]: ...  # sources, samples: uint64 [n]
    @property
    def asked(self) -> tuple[int, int]: ...  # of the stores: bytes, ranges
    @property
    def places(self) -> list[list[tuple[int, int]]]: ...  # offset, bytes of each sample's parts
    # read, queue, verify, assemble: name, begin, end on the clock of time.perf_counter_ns()
    @property
    def stages(self) -> list[tuple[str, int, int]]: ...
    @property
    def objects(self) -> list[tuple[int, int, int]]: ...  # source, object, bytes asked for

class PipelineThreads:
    """The threads of one loader, `threads` of them to begin with: data/pipeline_threads.h."""

    def __init__(self, threads: int, most: int) -> None: ...
    def use(self, threads: int) -> None: ...  # from now on; from 1 to `most`
    @property
    def threads(self) -> int: ...
    @property
    def most(self) -> int: ...
    @property
    def busy_ns(self) -> int: ...  # that they worked, added up

class Images:
    """The images of a batch that are decoded, or were: data/image_decoder.h. What follows wait() is
    a ValueError before they are there."""

    def ready(self) -> bool: ...
    def wait(self) -> None: ...  # raises what became of the batch
    @property
    def memory(self) -> Any: ...  # uint8 array [bytes]; no copy, lives as long as anything of it
    @property
    def kept(self) -> list[int]: ...  # the samples of the batch that they are
    @property
    def parts(self) -> list[int]: ...  # which part of each of these is the JPEG
    @property
    def damaged(self) -> list[tuple[int, str]]: ...  # the others, and why
    @property
    def stage(self) -> tuple[str, int, int]: ...  # as one of Batch.stages

class ImageDecoder:
    """Decodes the JPEGs of batches on threads of a pipeline: data/image_decoder.h."""

    def __init__(
        self,
        height: int,
        width: int,
        crop: str,  # random centre whole
        flip: bool,
        normalise: tuple[tuple[float, float, float], tuple[float, float, float]] | None,
        seed: int,
        threads: PipelineThreads,
        spares: int,
        arena: Arena | None = None,
    ) -> None: ...
    # The batch's sample i stands at position `first` + i of epochs of `samples`; 0: no epochs.
    def decode(self, batch: Batch, first: int, samples: int) -> Images: ...

# Bytes that were compressed as a whole ("gz", "zstd"), `most` at the most: data/unpack.h.
def unpack(packed: bytes, kind: str, most: int) -> bytes: ...

# A JPEG whose shorter side has `side` pixels; None if it has no more of them: data/shrink.h.
def shrink_jpeg(file: bytes, side: int, quality: int) -> bytes | None: ...

class BatchReader:
    """Reads samples of several sources into batches: data/batch_reader.h. A source is its store,
    its table, and two more things. One is the type of its integers ("uint16"), which then come as
    int64, or None. The other is the tags of its objects, which the store compares at each read, or
    []."""

    def __init__(
        self,
        sources: list[tuple[Store, SampleTable, str | None, list[str]]],
        spares: int,
        unpacked_bytes: int,  # of each source, for compressed objects
        threads: PipelineThreads,
        arena: Arena | None = None,  # where batches lie, as far as there is room
    ) -> None: ...
    def read(self, sequence: Sequence, first: int, last: int) -> Batch: ...  # of positions
    def read_samples(self, source: int, samples: Any) -> Batch: ...  # uint64 [n]

class Runtime:
    """The threads and the memory cap of a process. `threads`: CPU pool; `budget_bytes`: hard cap
    that arenas and stores draw on;
    `engine`: "auto", "uring" or "posix"; `depth`: disk operations in flight at most;
    `stall_seconds`: a disk that has not answered for so long is given up, which is an IoError with
    errno ETIMEDOUT (the log names it before that)."""

    def __init__(
        self,
        engine: str = "auto",
        threads: int = 2,
        budget_bytes: int = 1 << 62,
        depth: int = 64,
        stall_seconds: int = 300,
    ) -> None: ...
    def arena(self, bytes: int) -> Arena: ...  # OverBudget
    # Fills a chunk's memory from parts (where in it, address, bytes), sorted, with zeros between
    # them. On the pool: the memory must stay until wait() has returned.
    def gather(self, address: int, bytes: int, parts: list[tuple[int, int, int]]) -> Hashing: ...
    # Copies parts out of a chunk's memory. Compare the hash before you believe them.
    def scatter(self, address: int, bytes: int, parts: list[tuple[int, int, int]]) -> Hashing: ...
    def open_store(
        self,
        composition: str,
        create: bool = False,
        capacity_bytes: int = 0,
        read_only: bool = False,
        holder: str = "",
        chunk_bytes: int = 1 << 20,
        objects_max: int = 1 << 16,
        same_disk: bool = False,  # a new coded store's shards may share a disk
        # shards of a coded store that are lost for good: where there is nothing now, made anew and
        # rebuilt while it is open
        replace: Several[str] = [],
        # how capacity_bytes is shared out over a new local store's volumes, as they are named;
        # none: equally
        volume_weights: Several[float] = [],
    ) -> Store: ...
    # reads writes syncs read_bytes written_bytes submissions short_transfers retries
    def io_counters(self) -> dict[str, int]: ...
    # What Loop and pool do from here on, as (track "disk"|"queue"|"kernels", name, begin ns, end
    # ns, bytes, thread) on the clock of time.perf_counter_ns(), and how many spans were dropped
    # beyond `spans_max`.
    def start_trace(self, spans_max: int = 1 << 18) -> None: ...
    def stop_trace(self) -> tuple[list[tuple[str, str, int, int, int, int]], int]: ...
    @property
    def engine(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def budget_bytes(self) -> int: ...
    @property
    def budget_used(self) -> int: ...
    @property
    def budget_peak(self) -> int: ...

class Arena:
    """Pre-faulted memory in large pages. Any thread."""

    # rounded up to 4 KiB; OverBudget when no free range is large enough
    def take(self, bytes: int) -> Buffer: ...
    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def used(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def largest_free(self) -> int: ...
    @property
    # {"kind": "hugetlb" | "transparent" | "small", "large_bytes", "total_bytes"}
    def pages(self) -> dict[str, Any]: ...

class Buffer:
    """Memory of an Arena. ``torch.from_dlpack(buffer)`` gives a uint8 tensor [size] without a copy
    whose storage keeps the memory: it returns to the arena when this handle and every tensor over
    that storage are gone (on whichever thread that happens).
    """

    @property
    def address(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    # whether an exported tensor storage (DLPack) still holds the memory
    def shared(self) -> bool: ...
    def release(self) -> None: ...  # drops this handle's hold; tensors keep theirs
    def __dlpack__(self, **_: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int) -> memoryview: ...

class Future:
    def ready(self) -> bool: ...
    # the result (a version for a commit, else None); raises the error; TimeoutError
    def wait(self, timeout: float | None = None) -> Any: ...
    # the message of the error if it is ready and failed, without raising
    def error(self) -> str | None: ...

class Hashing:
    def wait(self) -> bytes: ...  # XXH3-128 of the chunk, as xxh3_128() gives it

class Store:
    # Memory that is drawn on the budget of its Runtime; OverBudget
    def arena(self, bytes: int) -> Arena: ...
    # atomic ("object" | "transaction"), and whether it has: update (writes into existing objects)
    # snapshots conditional (require()) verified (bytes that differ from what was written are
    # Corruption) versions
    def features(self) -> dict[str, Any]: ...
    # composition committed durable capacity_bytes used_bytes map_bytes read_only snapshots{name:
    # version} volumes{path: {read_bytes, written_bytes, bytes_per_second, capacity_bytes,
    # free_bytes, refused_bytes}}: of a local store, since it was opened; the rate of the last
    # gigabyte; refused: what went to the others while this one had no room for it cache: of a
    # cached store since it was opened, else None: {usable_bytes held_bytes hit_bytes
    # memory_hit_bytes (blocks that stay in memory, or wait for
    # their commit) merged_bytes (somebody else fetched it) fetched_bytes
    # admitted_bytes commits damaged_blocks plans (followed now) epochs (of plans, that are over)
    # epoch_fetched_bytes epoch_bound_bytes (of the last: what it fetched, the least)
    # ahead_depth_bytes (how far one fetches ahead now) ahead_bytes (fetched ahead and not read yet)
    # prefetched_bytes (of fetched_bytes) prefetched_in_vain_bytes (dropped before they were read)
    # stalls (reads of plans with `ahead` that waited for the slow store) off (why the fast store is
    # not used now, or "")}
    def info(self) -> dict[str, Any]: ...
    # Of a coded store, else None: epoch live[path of a disk that counts, as the composition names
    # it; in no order] troubles[sentence] affected[key of an object that cannot be read in full
    # while more disks are missing than the code bears] newer_blocks decoded_blocks mended_blocks
    # rebuilt_bytes folds lost_chunks stuck_stripes lost_why; doing (a repair, a scrub that was
    # asked for): None or {what, done, total (chunks), bytes}; scrub, the one that goes on by
    # itself: {passes, last: None or {chunks, bytes, mended{...}, lost[sentence], lost_unlisted},
    # found (by all passes), doing, stopped (why the last pass ended early)}; all since it was
    # opened. scrubbed, the last scrub of either kind that came to its end, whenever that was: None
    # or {ended_at (seconds since 1970), found, lost}.
    def health(self) -> dict[str, Any] | None: ...
    # key bytes chunk_bytes version tag (tells its contents apart); NotFound
    def stat(self, key: str, snapshot: str = "") -> dict[str, Any]: ...
    def exists(self, key: str, snapshot: str = "") -> bool: ...
    def list(self, prefix: str = "", snapshot: str = "") -> list[dict[str, Any]]: ...
    # What stands directly below the prefix: objects, and folders (up to and with the next '/').
    def list_level(
        self, prefix: str = "", snapshot: str = ""
    ) -> tuple[list[dict[str, Any]], list[str]]: ...
    def read_bytes(
        self, key: str, offset: int = 0, bytes: int | None = None, snapshot: str = ""
    ) -> bytes: ...
    def read(
        self,
        key: str,
        offset: int,
        address: int,
        bytes: int,
        priority: Priority = "prefetch",
        txn: Transaction | None = None,
        snapshot: str = "",
    ) -> Future: ...
    # pieces: uint64 [n, 4], C order: which key, offset in the object, bytes, offset from `address`.
    # All are read at once. `bytes`: of memory at `address`. The error of the first that failed.
    def read_many(
        self,
        keys: list[str],
        pieces: Any,
        address: int,
        bytes: int,
        priority: Priority = "prefetch",
    ) -> Future: ...
    # An array of uint8 over memory that the store lends, or over a copy where it cannot. Not to be
    # written to.
    def view(self, key: str, offset: int, bytes: int, snapshot: str = "") -> Any: ...
    def begin(self) -> Transaction: ...
    # Drops what caches hold of these bytes: who finds a wrong hash calls it and reads once more.
    def forget(self, key: str, offset: int, bytes: int) -> None: ...
    # Objects are removed to make room for others like them: the store may keep so many bytes of
    # removed ones, to write into them again, until it is closed. 0 ends that.
    def keep_space(self, bytes: int) -> None: ...
    # Tells a cache what will be read, so that it keeps what is read soonest. ranges: (key, offset,
    # bytes) in order of use; or, with keys, an array of uint64, C order, [n, 3]: which key, offset,
    # bytes; [n, 5]: also how many such items there are, and how far apart. seed: all items once an
    # epoch, by Permutation(n, seed, epoch). counts (items of each source) and weights too: drawn by
    # Mixture(weights, seed), source i shuffled with seed + 1 + i. position: that is read next,
    # counted through all epochs. A plan takes the place of the one of its name; one without ranges
    # ends it. It asks for each object once. Nothing where there is no cache.
    def follow(
        self,
        ranges: Any,
        keys: list[str] = [],
        seed: int | None = None,
        counts: list[int] = [],
        weights: list[float] = [],
        position: int = 0,
        name: str = "",
        ahead: bool = False,
    ) -> None: ...
    # One durable commit; moves no bytes where the store can do without; Conflict if from_key
    # changed.
    def copy(self, from_key: str, to_key: str) -> int: ...
    def snapshot(self, name: str) -> Future: ...
    # "deferred": the next durable commit carries it, and its space is free then
    def drop(self, name: str, durability: str = "durable") -> Future: ...
    # waits for what is in flight, abandons what is not committed, frees the lock; Busy while a
    # PlaneIo is open
    def close(self) -> None: ...

class Transaction:
    """A step (or any atomic change). Dropping it abandons it."""

    def resize(self, key: str, bytes: int, chunk_bytes: int = 0) -> None: ...
    # waits; the bytes are copied to aligned memory once
    def write_bytes(self, key: str, offset: int, data: bytes) -> None: ...
    def write(
        self, key: str, offset: int, address: int, bytes: int, priority: Priority = "write_back"
    ) -> Future: ...
    def read_bytes(self, key: str, offset: int, bytes: int) -> bytes: ...  # sees what is staged
    def remove(self, key: str) -> None: ...
    # "read_only" | "write_only" | "read_write": what the object is for; wrong, it costs speed only
    def expect(self, key: str, expected: str) -> None: ...
    # commit() raises Conflict unless the object has this tag then, or is absent (None).
    def require(self, key: str, tag: str | None) -> None: ...
    # The commit, which must be durable, names the version that it makes, as Store.snapshot() does,
    # with no flush of its own.
    def name(self, snapshot: str) -> None: ...
    # "durable" | "deferred"; Busy while updates still run; fails once poisoned
    def commit(self, durability: str = "durable") -> Future: ...
    # stops updates that have not begun, waits for those that have, gives everything up
    def abandon(self) -> None: ...
    @property
    # why commit would fail (the first failed update), or None
    def poisoned(self) -> str | None: ...
    @property
    def active_jobs(self) -> int: ...

class PlaneIo:
    """What moves bytes between a store, the arena and the optimizer kernels, all without the GIL.

    `tiles` buffers are taken from the arena at once: the most state in flight. Each has
    `tile_elements` elements (a power of two from 32 Ki, "8bit" 64 Ki, to 2 Mi). An element takes 12
    bytes, 8 with moments "bf16", a little over 6 with "8bit". `moments`: how m and v are kept;
    `seed`: of the draws that round them.
    """

    def __init__(
        self,
        runtime: Runtime,
        store: Store,
        arena: Arena,
        tiles: int = 4,
        tile_elements: int = 1 << 19,
        moments: str = "exact",
        seed: int = 0,
    ) -> None: ...

    # Blocks. `elements`: padded to a multiple of 2048. `dtype`: "bf16" or "f32". `planes`: which of
    # "rmv" exist beside the weights ("r" is implied by bf16 unless frozen). A frozen block has
    # weights only, of any `element_bytes`.
    def add_block(self, name: str, elements: int, dtype: str, planes: str = "mv") -> int: ...
    def add_frozen(self, name: str, elements: int, element_bytes: int) -> int: ...
    # makes its objects: weights to be written, state as sparse zeros
    def create_block(self, block: int, txn: Transaction) -> None: ...
    # Mismatch unless the store has its planes with these sizes and chunks
    def check_block(self, block: int) -> None: ...
    # {"w": {"key", "bytes", "chunk_bytes"}, ...}
    def planes(self, block: int) -> dict[str, dict[str, Any]]: ...
    def fetch_weights(
        self,
        block: int,
        address: int,
        priority: Priority = "prefetch",
        txn: Transaction | None = None,
    ) -> Future: ...
    # a whole weight plane; with bf16 the remainder stays as it is
    def store_weights(self, block: int, address: int, txn: Transaction) -> Future: ...

    # Segments: sorted by offset, not overlapping. `source`: where the old state (and weights, if
    # weight_in is 0) come from: None = the committed version, or a Transaction.
    # weight_in: address of the old weight plane, 0 = read it. weight_out: where a copy of the new
    # plane goes (may equal weight_in), 0 = it is only staged. Writes never read it.
    def update(
        self,
        block: int,
        segments: Several[Segment],
        weight_in: int,
        weight_out: int,
        txn: Transaction,
        source: Transaction | None = None,
        hashes: bool = False,
    ) -> UpdateJob: ...
    # tiles begun; never blocks
    def prefetch_state(
        self, block: int, source: Transaction | None = None, weights: bool = False
    ) -> int: ...
    def drop_prefetched(self) -> None: ...
    def lend(self, address: int, bytes: int) -> int: ...
    def recall(self, address: int, bytes: int) -> None: ...
    # keeps its r, m, v in the arena from now on (OverBudget if they do not fit)
    def retain(self, block: int) -> None: ...
    def release(self, block: int) -> None: ...
    def invalidate(self, block: int) -> None: ...  # the next update reads its state again
    def retained_bytes(self) -> int: ...

    # Gradients: (address, count, dtype).
    # 16 bytes; equal to UpdateJob.hashes() of a segment with these bytes
    def hash(self, address: int, bytes: int) -> bytes: ...
    def hash_many(self, spans: Several[tuple[int, int]]) -> list[bytes]: ...
    # float64, the same whatever the thread count
    def sum_of_squares(self, spans: Several[tuple[int, int, str]]) -> list[float]: ...
    def scale(self, spans: Several[tuple[int, int, str]], factor: float) -> None: ...

    # of kernels, hashes and checksums of updates so far, over the threads of the pool
    def arithmetic_seconds(self) -> float: ...
    def counters(self) -> dict[str, Any]: ...
    # read_bytes / written_bytes {weights, remainder, m, v, other}; seconds {kernel, hash, copy,
    # stage, read_latency, write_latency, wait_compute, wait_written}; tiles, tiles_prefetched,
    # tiles_retained, prefetch_dropped
    def close(self) -> None: ...  # waits for everything in flight and gives the tile buffers back

class Hyper:
    # the parameter's own hyperparameters; ValueError for a name or a step that cannot be
    def __init__(
        self,
        *,
        algorithm: str,  # "adamw", "adam", "sgd" or "lion"
        lr: float,
        step: int,  # the parameter's own count, 1 for its first update
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        dampening: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        grad_scale: float = 1.0,
    ) -> None: ...
    @property
    def lr(self) -> float: ...
    @property
    def step(self) -> int: ...
    def __eq__(self, arg: object) -> bool: ...

class Segment:
    # One parameter's share of an update. parameter: its index. offset, count: elements in the
    # block. grad: the gradient's address, dtype "bf16" or "f32".
    def __init__(
        self, parameter: int, offset: int, count: int, grad: int, dtype: str, hyper: Hyper
    ) -> None: ...

class UpdateJob:
    # all read, computed and handed over: gradients and both weights are free again
    def wait(self) -> None: ...
    def wait_written(self) -> None: ...  # and all writes are done
    def computed(self) -> bool: ...
    def written(self) -> bool: ...
    # of each segment's gradient bytes as consumed; waits; only if asked for
    def hashes(self) -> list[bytes]: ...
    def finite(self) -> bool: ...  # no NaN and no infinity in the gradients as consumed; waits

# The kernels by themselves, over memory at the given addresses; `count` elements. Types: "bf16" or
# "f32".

def optim_update(
    count: int,
    *,
    weight_type: str,
    grad_type: str,
    weight_in: int,
    weight_out: int,  # may equal weight_in
    grad: int,
    remainder: int = 0,  # with bf16 weights
    m: int = 0,
    v: int = 0,
    hyper: Hyper,
    moments: str = "exact",  # how m and v are kept: "exact", "bf16" or "8bit"
    m_scales: int = 0,  # with "8bit": float32, one for each 256 elements
    v_scales: int = 0,
    seed: int = 0,  # beside step, parameter and element the key of the draws that round them
    parameter: int = 0,
) -> None: ...  # ValueError for a plane that is missing or a name that is unknown

# "m" or "v" as kept -> float32
def optim_decode_moment(
    moments: str, which: str, data: int, scales: int, to: int, count: int
) -> None: ...

# and back, to the nearest
def optim_encode_moment(
    moments: str, which: str, from_: int, data: int, scales: int, count: int
) -> None: ...

# float32 -> bf16 weights and 16-bit remainders
def optim_split(masters: int, weights: int, remainders: int, count: int) -> None: ...
def optim_join(weights: int, remainders: int, masters: int, count: int) -> None: ...  # and back

# of each piece of 65,536 elements, in float64
def optim_sums_of_squares(grad: int, grad_type: str, count: int) -> list[float]: ...

# so_far plus these, in order
def optim_sum_of_squares(grad: int, grad_type: str, count: int, so_far: float = 0.0) -> float: ...

# in float32, rounded to the gradient's type
def optim_scale(grad: int, grad_type: str, count: int, factor: float) -> None: ...
def optim_target() -> str: ...  # the instruction set in use: "AVX3" (AVX-512), "AVX2" or "scalar"
