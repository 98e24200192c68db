"""The images of a site, the detector, its loss and its test."""

import torch
from torch.utils.data import Dataset
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead

from fedbn_flwr.training import OwnTask

COUNTS = {"train": 24, "test": 12}
# brightness, contrast and noise of each site's camera
CAMERAS = ((0.2, 0.6, 0.05), (0.6, 0.3, 0.05), (0.1, 0.3, 0.15), (0.8, -0.5, 0.1))


class Drawn(Dataset):
    """Images of unequal sizes with one or two rectangles, drawn from their number."""

    def __init__(self, site, part):
        self.site, self.part = site, part

    def __len__(self):
        """Return the number of images."""
        return COUNTS[self.part]

    def __getitem__(self, at):
        """Return an image (3, H, W), and its boxes (N, 4) with labels (N,)."""
        seed = 10_000 * self.site + 1000 * (self.part == "test") + at
        draw = torch.Generator().manual_seed(seed)
        height, width = whole(56, 73, draw), whole(56, 73, draw)
        brightness, contrast, noise = CAMERAS[self.site]
        image = noise * torch.randn(3, height, width, generator=draw) + brightness
        boxes = []
        for _ in range(whole(1, 3, draw)):
            h, w = whole(18, 33, draw), whole(18, 33, draw)
            y, x = whole(0, height - h, draw), whole(0, width - w, draw)
            image[:, y : y + h, x : x + w] += contrast
            boxes.append([x, y, x + w, y + h])
        labels = torch.ones(len(boxes), dtype=torch.int64)
        return image, {"boxes": torch.tensor(boxes).float(), "labels": labels}


def whole(low, high, draw):
    """Return a whole number from ``low`` to ``high - 1``."""
    return int(torch.randint(low, high, (), generator=draw))


def images(site, part):
    """Return a part of a site's data: ``dataset: detection.task:images``."""
    return Drawn(int(site), part)


def lists(examples):
    """Return a batch as lists, because images have unequal sizes."""
    return [image for image, _ in examples], [target for _, target in examples]


images.collate_fn = lists
images.site_names = ["bright", "pale", "noisy", "inverted"]


def detector():
    """Return Faster R-CNN with trainable BatchNorm, for one class on small images."""
    net = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None,
        weights_backbone=None,
        num_classes=2,
        min_size=64,
        max_size=96,
        rpn_batch_size_per_image=32,
        rpn_pre_nms_top_n_train=60,
        rpn_post_nms_top_n_train=30,
        rpn_pre_nms_top_n_test=60,
        rpn_post_nms_top_n_test=30,
        box_batch_size_per_image=24,
        box_detections_per_img=10,
    )
    # A small head for one class trains in half of the time.
    net.roi_heads.box_head = TwoMLPHead(256 * 7 * 7, 128)
    net.roi_heads.box_predictor = FastRCNNPredictor(128, 2)
    return net


def loss(model, inputs, targets):
    """Return the sum of the detector's losses, each a mean over the batch."""
    return sum(model(inputs, targets).values())


def test(model, batches):
    """Return the mean average precision over the boxes of a test set."""
    from torchmetrics.detection import MeanAveragePrecision

    metric = MeanAveragePrecision()
    for inputs, targets in batches:
        metric.update(model(inputs), targets)
    found = metric.compute()
    return {"map": found["map"], "map-50": found["map_50"]}


DETECTION = OwnTask(
    "detection",
    loss=loss,
    test=test,
    score="map",
    higher_is_better=True,
    share=True,
    loss_in_train_mode=True,
    test_batch=12,
)
