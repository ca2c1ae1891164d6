"""One run from its settings to its results: corpus, model, loop, held-out loss, export, report.

The order matters at three places. The data position counts a batch as soon as it was given out, and
is read at opt.step(). The schedule steps *after* opt.step(): the record that closes a step is taken
when the next forward begins (or at flush), so it then says where the run goes on. A step's ledger
line is written before the step can be committed, or committed with it. If it cannot be written, the
error is raised only after both have moved on. run.json is written before the store is made, so a
run can be resumed whenever it was killed.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import stoker

from ..command import sentence
from ..data import (
    CorpusError,
    Loader,
    TokenFile,
    Windows,
    default_corpus,
    load_tokenizer,
    prepare_apart,
)
from ..errors import AlreadyExists, InvalidArgument, NotFound, StokerError
from ..offload.model.blocks import partition
from ..offload.paging.link import open_link
from ..offload.division.machine import LINK
from ..offload.planning.products import TYPES, quickest_type
from ..plan.measure import measure_machine
from ..offload.planning.planner import Setting, compare, with_moments
from ..plan.outlook import ADAMW
from ..plan.text import PolicyEvents, comparison_text, event_text, plan_text, rates_text
from .evaluate import chosen_windows, continuation, heldout_loss, unigram_entropy
from .export import export_model
from ..report import figures
from ..report.ledger_file import LedgerFile, read_ledger
from .memory import MemoryPeak
from .model import Model, ModelConfig, compute_seconds, initialise, next_token_loss
from .progress import TrainingProgress, clock, counting_bar, say
from ..report.folder import LEDGER_FILE, PLAN_FILE, REPORT_FILE, SUMMARY_FILE, RunFolder
from .saving import CHECKPOINTS_FOLDER, Saving
from .settings import RUN_FILE, STEPS, STEPS_SECONDS, Settings, UsageError, write_json, write_run
from .stop import Stopped, StopSignals

if TYPE_CHECKING:
    from ..offload.division.machine import Machine
    from ..report.metrics import Metrics

STORE_FOLDER, EXPORT_FOLDER = "store", "export"
PROBE_SECONDS, PROBE_BYTES = 1.0, 16 << 20  # to measure the machine with before a run
# steps that are not compared with the plan: the order is not recorded yet, the moments are sparse
# zeros
WARM_UP = 3


def choose_device(wanted: str) -> torch.device:
    """Where to compute; `auto` takes a GPU if torch sees one."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        open_link(device)
    except (RuntimeError, InvalidArgument) as error:
        raise UsageError(f"--device {wanted}: {str(error).splitlines()[0]}") from None
    return device


def rate_at(step: int, settings: Settings) -> float:
    """The factor on the learning rate for the step after `step` decided ones: linear warm-up,
    cosine to a twentieth."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    along = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, along)))


def finite(loss: float, step: int) -> float:
    """`loss`, or InvalidArgument before a step on a loss that is no number spoils the weights."""
    if not math.isfinite(loss):
        raise InvalidArgument(
            f"the loss of step {step} is {loss}: the training has diverged; start again with a "
            f"lower"
            " --learning-rate"
        )
    return loss


class Corpus:
    """The token file of a run and its two splits."""

    def __init__(self, settings: Settings, out: Path, rebuild: bool) -> None:
        paths, skip = settings.data, ()
        if not paths:
            paths, skip = (str(default_corpus()),), ("translations",)
        cache = Path(settings.cache) if settings.cache else out / "data"
        tokenizer = Path(settings.tokenizer) if settings.tokenizer else None
        self.prepared = prepare_apart(paths, cache, settings.vocabulary, tokenizer, skip, rebuild)
        self.tokens = [TokenFile(path) for path in self.prepared.tokens]
        self.tokenizer = load_tokenizer(Path(self.prepared.tokenizer))
        self.train = Windows(self.tokens, "train", settings.window)
        self.heldout = Windows(self.tokens, "heldout", settings.window)
        self.vocabulary = self.tokens[0].header.vocabulary
        self.key = self.tokens[0].header.key.hex()
        self.train_tokens = sum(each.header.train_tokens for each in self.tokens)
        self.heldout_tokens = sum(each.header.heldout_tokens for each in self.tokens)
        for name, windows, count in (
            ("training", self.train, self.train_tokens),
            ("held-out", self.heldout, self.heldout_tokens),
        ):
            if not len(windows):
                raise CorpusError(
                    f"the corpus has {count} {name} tokens, fewer than one window of "
                    f"{settings.window} and the next token. Give more text with --data, or a "
                    f"smaller --window"
                )

    def describe(self) -> str:
        how = "built" if self.prepared.built else "found again"
        return (
            f"corpus       {self.prepared.files} files, {self.prepared.text_bytes / 1e6:.1f} MB,"
            f" {self.train_tokens} training and {self.heldout_tokens} held-out tokens,"
            f" vocabulary {self.vocabulary} (token file {how})"
        )

    def close(self) -> None:
        for each in self.tokens:
            each.close()


class Run:
    """Everything of one run while it goes. Made by train(); the main thread's."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        stored: dict[str, Any] | None,
        rebuild: bool,
        stop: StopSignals,
        metrics: Metrics | None,
    ) -> None:
        self.settings, self.out, self.stop, self.metrics = settings, out, stop, metrics
        self.device = choose_device(settings.device)
        gpu = self.device.type == "cuda"
        say(f"device       {torch.cuda.get_device_name(self.device) if gpu else self.device}")
        self.store = settings.store or str((out / STORE_FOLDER).resolve())
        check_memory(settings)
        out.mkdir(parents=True, exist_ok=True)
        self.corpus = Corpus(settings, out, rebuild)
        say(self.corpus.describe())
        self.chosen = chosen_windows(self.corpus.heldout, settings.eval_windows)
        self.config = ModelConfig(
            self.corpus.vocabulary,
            settings.layers,
            settings.hidden,
            settings.heads,
            settings.feed_forward,
            settings.window,
        )
        self._check_identity(stored)
        self.facts = {key: value for key, value in (stored or {}).items() if key != "settings"} | {
            "corpus_key": self.corpus_key
        }
        self.loader = Loader(self.corpus.train, settings.batch, settings.seed, endless=True)
        self.entropy = unigram_entropy(self.corpus.heldout, self.chosen)
        self.begun_here = stored is None
        self._made = [file for file in volume_files(self.store) if not file.exists()]
        self.saving = Saving(settings, out, resume=stored is not None)
        write_run(out, settings, **self.facts)
        # Before the model is made or taken up: this draws random numbers, which belong to the run
        # from there on.
        self._choose(precision=self._precision())
        self.machine = self._measure()
        compute = (
            compute_seconds(
                self.config, TYPES[self.settings.precision], settings.batch, self.device
            )
            if self.machine
            else 0.0
        )
        try:
            self.model, self.opt = self._offload(resume=stored is not None)
            self.plan = self.opt.plan(self.machine, compute)
            self._choose(steps=self._steps())
        except BaseException:
            self.undo()
            raise
        settings = self.settings
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda step: rate_at(step, settings)
        )
        self.ledger = LedgerFile(out / LEDGER_FILE)
        self.opt.attach(scheduler=self.scheduler, loader=self.loader, ledger=self.ledger)
        for group, rate in zip(self.opt.param_groups, self.scheduler.get_last_lr(), strict=True):
            # making a scheduler sets the rate of step 0; a resumed run is elsewhere
            group["lr"] = rate
        # steps up to here are other processes', whose settings may have been others
        self.began_at = self.opt.step_count
        write_json(
            out / PLAN_FILE,
            {"plan": self.plan, "behind": self.began_at, "unigram_entropy": self.entropy},
        )
        self.before = self.facts.get("heldout_loss_before")
        self.after: float | None = None
        self.sample = ("", "")
        self.finished = False

    def _choose(self, **chosen: Any) -> None:
        """The run keeps what it chose, whatever a resume would measure."""
        self.settings = replace(self.settings, **chosen)
        write_run(self.out, self.settings, **self.facts)

    def _precision(self) -> str:
        """The type of the weights: the one that this processor multiplies quicker, unless one is
        named."""
        if self.settings.precision != "auto":
            return self.settings.precision
        if self.device.type != "cpu":
            return "bfloat16"
        quickest = quickest_type(self.settings.batch * self.settings.window, self.config.hidden)
        say(f"precision    {quickest}")
        return quickest.name

    def _steps(self) -> int:
        """As many as end within STEPS_SECONDS, if none are named, but enough to learn something."""
        if self.settings.steps:
            return self.settings.steps
        return min(
            STEPS,
            max(
                2 * self.settings.warmup,
                int(STEPS_SECONDS / self.plan["step"].get("seconds", 1e-9)),
            ),
        )

    def _measure(self) -> Machine | None:
        """What the plan reckons with; None where the disk cannot be measured, and then the plan has
        no seconds."""
        volumes = volume_files(self.store)
        try:
            for file in volumes:
                file.parent.mkdir(parents=True, exist_ok=True)
            say("measuring    the disk and this processor, for a few seconds")
            machine = measure_machine(
                [str(file.parent) for file in volumes],
                PROBE_SECONDS,
                PROBE_BYTES,
                self.settings.moments,
            )
        except (StokerError, OSError) as error:
            say(f"not planned  how long a step takes: {sentence(error)}")
            return None
        say(f"measured     {rates_text(machine)}")
        return machine if self.device.type == "cpu" else replace(machine, link=LINK)

    def _check_identity(self, stored: dict[str, Any] | None) -> None:
        """The corpus a run began with must still be the same bytes."""
        key = self.corpus.key
        if stored is not None and stored["corpus_key"] != key:
            raise InvalidArgument(
                "the corpus has changed since this run began, so the order of samples is lost. "
                "Restore the files, or give another --out to start a new run"
            )
        self.corpus_key = key

    def _offload(self, resume: bool):
        settings, dtype = self.settings, TYPES[self.settings.precision]

        def make() -> Model:
            model = Model(self.config, dtype)
            initialise(model)
            return model

        torch.manual_seed(settings.seed)
        checkpoints = self.saving.checkpoints
        model = stoker.build(
            make,
            seed=settings.seed,
            store=self.store,
            dram=settings.dram_bytes,
            snapshots=int(checkpoints is not None),
            stall_seconds=settings.stall_seconds,
        )
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        original = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
        # A run that was killed before its store was whole begins anew; one that has committed steps
        # must find them.
        steps = (
            max((line["committed"] for line in read_ledger(self.out / LEDGER_FILE)), default=0)
            if resume
            else 0
        )
        try:
            return stoker.offload(
                model,
                original,
                store=self.store,
                dram=settings.dram_bytes,
                policy=settings.policy,
                device=self.device,
                resume=True if steps else "auto" if resume else False,
                moments=settings.moments,
                activations=settings.activations,
                stall_seconds=settings.stall_seconds,
                checkpoints=checkpoints,
                restore=checkpoints if resume else None,
            )
        except NotFound as error:
            raise NotFound(
                f"the store {self.store} is empty, but {steps} steps of this run were committed "
                f"to it. Bring the store back, or name its place with --store; --overwrite "
                f"starts the run again"
            ) from error
        except AlreadyExists as error:
            raise AlreadyExists(
                f"the store {self.store} holds another run: continue that run with --resume and "
                f"its own --out, or give another --store"
            ) from error

    def evaluate(self, what: str) -> float:
        with counting_bar(len(self.chosen), what) as bar:
            return heldout_loss(
                self.model,
                self.corpus.heldout,
                self.chosen,
                self.settings.batch,
                self.device,
                bar.update,
            )

    def begin(self) -> None:
        """Print the plan; measure the untrained model, once in a run's life."""
        settings = self.settings
        say(plan_text(self.plan, settings.dram, self.store))
        say(self.saving.describe(self.plan["state_bytes"]))
        say(
            f"training     {settings.batch * settings.window} tokens a step, {settings.steps} steps"
            " in all"
        )
        if self.before is None:
            self.before = self.evaluate("held-out loss before")
            write_run(self.out, settings, **self.facts, heldout_loss_before=self.before)
        say(
            f"held-out     loss {self.before:.3f} before the training, unigram entropy"
            f" {self.entropy:.3f} nats a token"
        )
        if seconds := self.plan["step"].get("seconds"):
            left = settings.steps - self.opt.step_count
            say(
                f"expected     {clock(seconds * left)} (hours:minutes) for the {left} steps to"
                " come, as planned"
            )
        if self.opt.step_count:
            say(f"resumed      at step {self.opt.step_count} of {settings.steps}")

    def steps(self) -> None:
        """The loop. Ends early, with the step committed, when a signal has come."""
        opt, settings, ledger = self.opt, self.settings, self.ledger
        ledger.open(opt.step_count)
        progress = TrainingProgress(opt.step_count, settings.steps)
        opt.ledger.on_step(ledger.decided)
        if self.metrics is not None:
            opt.ledger.on_step(lambda _: self.metrics.add(ledger.last))
        opt.ledger.on_step(lambda row: progress.measured(row["seconds"], row["stall_seconds"]))
        policies = PolicyEvents()
        opt.ledger.on_step(
            lambda row: progress.tell(event_text(policies.fewer(row.get("events", []))))
        )
        tokens = settings.batch * settings.window
        self.model.train()
        opt.restart_ledger()
        batches = iter(self.loader)
        try:
            with self.stop.stepping():
                while opt.step_count < settings.steps and self.stop.requested is None:
                    with opt.ledger.waiting("data"):
                        windows = next(batches).to(self.device)
                    loss = next_token_loss(self.model, windows)
                    loss.backward()
                    opt.clip_grad_norm_(settings.clip)
                    ledger.about(
                        loss=finite(loss.item(), opt.step_count + 1),
                        tokens=tokens,
                        **self.saving.for_ledger(),
                    )
                    opt.step()
                    opt.zero_grad(set_to_none=True)
                    self.scheduler.step()
                    ledger.check()
                    progress.step(opt.step_count, loss.item(), tokens)
                    progress.tell(self.saving.stepped(opt))
                opt.flush()
                if self.stop.requested is not None and opt.step_count < settings.steps:
                    self.saving.ends(opt)
        finally:
            progress.close()
            if more := policies.summary():
                say(more)
            ledger.close()
            self.loader.close()

    def finish(self) -> None:
        """What comes after the last step: held-out loss, a continuation, the export."""
        self.after = self.evaluate("held-out loss after")
        say(
            f"held-out     loss {self.before:.3f} -> {self.after:.3f}, unigram entropy"
            f" {self.entropy:.3f} nats a token"
        )
        if self.settings.sample_tokens:
            first = self.corpus.heldout[self.chosen[0]][: self.settings.window // 2]
            prompt = self.corpus.tokenizer.decode(first.tolist(), skip_special_tokens=False)
            self.sample = (
                prompt,
                continuation(
                    self.model,
                    self.corpus.tokenizer,
                    prompt,
                    self.settings.sample_tokens,
                    self.settings.window,
                    self.device,
                    self.settings.seed,
                ),
            )
            say(f"continuation {prompt[-80:]!r} ->\n{self.sample[1]}")
        export_model(self.model, self.corpus.tokenizer, self.out / EXPORT_FOLDER, stoker.gather)
        self.finished = True

    def undo(self) -> None:
        """Leave nothing of a run that this call began and that has no step to go on from: it would
        be in the way of the next try."""
        self.saving.close()
        if self.begun_here:
            self.saving.forget()
            ours = (self.out / name for name in (RUN_FILE, PLAN_FILE, LEDGER_FILE))
            for file in (*self._made, *ours):
                file.unlink(missing_ok=True)

    def close(self) -> None:
        self.loader.close()
        self.saving.close()
        self.opt.close()
        self.corpus.close()


def check_memory(settings: Settings) -> None:
    """OverBudget for a cap in which this model cannot be trained, before the text is read. That
    counts with no more than what is known of the vocabulary and the type by now."""
    dtype = TYPES.get(settings.precision, torch.bfloat16)
    vocabulary = settings.vocabulary if not settings.tokenizer else 257
    config = ModelConfig(
        vocabulary,
        settings.layers,
        settings.hidden,
        settings.heads,
        settings.feed_forward,
        settings.window,
    )
    with torch.device("meta"):
        model = Model(config, dtype)
    Setting.of(
        partition(model, model.parameters()),
        with_moments(ADAMW, settings.moments),
        settings.dram_bytes,
    )


def volume_files(store: str) -> list[Path]:
    """The files that making the store would make; none of a composition, whose parts are not ours
    to tell."""
    if any(sign in store for sign in ":("):
        return []
    return [Path(part) / "stoker.volume" for part in store.split(",")]


def summarise(run: Run, process_peak: int) -> dict[str, Any]:
    """OUT/summary.json, over all steps of the run however often it was resumed."""
    rows = [
        row for row in read_ledger(run.out / LEDGER_FILE) if row["step"] <= run.opt.committed_step
    ]
    seconds = sum(row["seconds"] for row in rows)
    stalled = sum(sum(row["stall_seconds"].values()) for row in rows)
    moved = sum(
        sum(row["read_bytes"].values()) + sum(row["written_bytes"].values()) for row in rows
    )
    parameters = run.plan["parameters"]
    own = [row for row in rows if row["step"] > run.began_at]
    batches = figures.batches(rows)
    return {
        "finished": run.finished,
        "heldout_loss_before": run.before,
        "heldout_loss_after": run.after,
        "unigram_entropy": run.entropy,
        "steps": len(rows),
        "parameters": parameters,
        "state_bytes": run.plan["state_bytes"],
        "dram_cap_bytes": run.settings.dram_bytes,
        "dram_peak_bytes": max((row["dram_bytes_peak"] for row in rows), default=0),
        "process_peak_bytes": process_peak,
        "bytes_per_parameter_step": moved / (parameters * len(rows)) if rows else 0.0,
        "stall_share": stalled / seconds if seconds else 0.0,
        "batches": batches._asdict() if batches else {},
        "seconds": seconds,
        "tokens_per_second": sum(row["tokens"] for row in rows) / seconds if seconds else 0.0,
        "last_loss": rows[-1]["loss"] if rows else None,
        "device": str(run.device),
        "store": run.store,
        "checkpoints": run.saving.costs(),
        "plan": compare(run.plan, own[WARM_UP:] or own) if own else {},
        "continuation": dict(zip(("prompt", "text"), run.sample, strict=True)),
    }


def train(
    settings: Settings,
    out: Path,
    stored: dict[str, Any] | None,
    rebuild: bool,
    stop: StopSignals,
    metrics: Metrics | None = None,
) -> dict[str, Any]:
    """Run or resume to the end; `metrics` get each step. Returns the summary; raises Stopped (after
    writing it) when a signal came."""
    with MemoryPeak() as peak:
        run = Run(settings, out, stored, rebuild, stop, metrics)
        try:
            run.begin()
            run.steps()
            stop.check()
            run.finish()
        except BaseException as error:
            _ended_early(run, peak, error)
            raise
        run.close()
        return _write_results(run, peak)


def _ended_early(run: Run, peak: MemoryPeak, error: BaseException) -> None:
    """Leave results and a word on how to go on. What fails here must not hide the error that ended
    the run."""
    with contextlib.suppress(Exception):
        run.close()
    if run.begun_here and not run.opt.committed_step and not isinstance(error, Stopped):
        say("failed       before its first step was committed: nothing of the run is left")
        return run.undo()
    with contextlib.suppress(Exception):
        _write_results(run, peak)
    how = "stopped" if isinstance(error, Stopped) else "failed"
    say(
        f"{how:<13}step {run.opt.committed_step} of {run.settings.steps} is committed; --resume"
        " goes on from there"
    )


def forget_run(out: Path) -> None:
    """Remove the run that `out` holds; token files stay, and so does a store outside of `out`. For
    --overwrite only."""
    for name in (RUN_FILE, SUMMARY_FILE, PLAN_FILE, LEDGER_FILE, REPORT_FILE):
        (out / name).unlink(missing_ok=True)
    for folder in (out / STORE_FOLDER, out / EXPORT_FOLDER, out / CHECKPOINTS_FOLDER):
        if folder.is_dir():
            shutil.rmtree(folder)


def _write_results(run: Run, peak: MemoryPeak) -> dict[str, Any]:
    summary = summarise(run, peak.bytes)
    write_json(run.out / SUMMARY_FILE, summary)
    if summary["plan"]:
        say(comparison_text(summary["plan"]))
    if data := summary["batches"]:
        say(
            f"batches      waited for {data['share']:.2%} of the time;"
            f" {data['late']} of {data['batches']} were not ready when they were asked for"
        )
    if run.before is not None:
        RunFolder(run.out).write_report(run.out / REPORT_FILE)
    return summary
