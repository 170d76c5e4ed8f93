from compress.core.metrics import Metric
from compress.training.checkpoint import Epoch
from compress.training.config.training import Training
from compress.training.loop.trainer import epochs_without_gain, is_finished

ACCURACY = Metric("accuracy")


def epochs(*values):
    return [
        Epoch(epoch=number, loss=1.0, metric=value, learning_rate=0.1)
        for number, value in enumerate(values, 1)
    ]


def test_epochs_are_counted_since_the_best():
    assert epochs_without_gain(epochs(0.5, 0.6, 0.6, 0.5, 0.7), ACCURACY) == [0, 0, 1, 2, 0]
    assert epochs_without_gain(epochs(0.5, 0.4), Metric("loss")) == [0, 0]


def test_a_training_is_over_after_its_epochs_or_its_patience():
    patient, whole = Training(epochs=5, early_stopping=2), Training(epochs=5)
    assert not is_finished(patient, [], ACCURACY)
    assert not is_finished(patient, epochs(0.5, 0.4), ACCURACY)
    assert is_finished(patient, epochs(0.5, 0.4, 0.4), ACCURACY)
    assert not is_finished(whole, epochs(0.5, 0.4, 0.4), ACCURACY)
    assert is_finished(whole, epochs(*[0.5] * 5), ACCURACY)
