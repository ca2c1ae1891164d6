"""Lightning's Trainer saves and goes on through StokerCheckpointIO."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker import errors
from stoker.ckpt import cli as ckpt_cli

lightning = pytest.importorskip("lightning", reason="Lightning is not installed")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from stoker.integrations.lightning import StokerCheckpointIO  # noqa: E402


class Small(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    def training_step(self, batch, _):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": opt, "lr_scheduler": torch.optim.lr_scheduler.StepLR(opt, 1)}


def trainer_of(folder, epochs: int, **options):
    saver = ModelCheckpoint(dirpath=folder, save_top_k=2, monitor="step", mode="max")
    return lightning.Trainer(
        max_epochs=epochs,
        plugins=[StokerCheckpointIO(staging="16MiB")],
        callbacks=[saver],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def batches():
    data = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def test_a_trainer_goes_on_with_the_same_bits(tmp_path):
    whole = Small()
    trainer_of(tmp_path / "whole", 4).fit(whole, batches())
    folder = tmp_path / "run"
    trainer_of(folder, 2).fit(Small(), batches())
    (newest,) = folder.glob("*step=6.ckpt")
    again = Small()
    trainer_of(folder, 4).fit(again, batches(), ckpt_path=newest)
    for name, value in again.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    assert not list(folder.glob("*step=3.ckpt"))  # Lightning had it removed
    assert all(ckpt_cli.main(["verify", str(each)]) == 0 for each in folder.glob("*.ckpt"))


def test_what_it_cannot_write_is_named(tmp_path):
    files = StokerCheckpointIO(staging="16MiB")
    with pytest.raises(errors.InvalidArgument, match="object"):
        files.save_checkpoint({"state_dict": {}, "thing": object()}, tmp_path / "a.ckpt")
    with pytest.raises(FileNotFoundError):
        files.load_checkpoint(tmp_path / "b.ckpt")
    whole = {"state_dict": {"module.w": torch.ones(3)}, "global_step": 4, "n": {1: (2, None)}}
    for _ in range(2):  # the second takes the first one's place
        files.save_checkpoint(whole, tmp_path / "c.ckpt")
    assert len(list((tmp_path / "c.ckpt").glob("step-*"))) == 1
    loaded = files.load_checkpoint(tmp_path / "c.ckpt", map_location="cpu")
    assert loaded.pop("state_dict")["module.w"].tolist() == [1, 1, 1]
    assert loaded == {"global_step": 4, "n": {1: (2, None)}}
    files.remove_checkpoint(tmp_path / "c.ckpt")
    assert not (tmp_path / "c.ckpt").exists()
