import pytest

from twostroke.hardware import _processor


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2.5GHz\nflags\t\t: fpu\n", "Some CPU @ 2.5GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n", "ARM Neoverse-N1"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xfff\n", ""),
        ("processor\t: 0\nCPU implementer\t: 0xc0\nCPU part\t: 0xd0c\n", ""),
        ("", ""),
    ],
)
def test_the_processor_in_words(told: str, name: str) -> None:
    assert _processor(told) == name
