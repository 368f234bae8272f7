"""The names of dtypes and storage classes in files of torch, and their widths.

Readers and writers of torch's files look names up here.
"""

from rankless.ondisk import dtypes
from rankless.ondisk.dtypes import BY_TORCH_NAME

#: Further torch dtypes, which safetensors files lack.
OTHERS = (
    *(f"uint{bits}" for bits in range(1, 8)),
    *(f"int{bits}" for bits in range(1, 8)),
    "bcomplex32",
    "complex128",
    "complex32",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "bits16",
    "qint8",
    "qint32",
    "quint8",
    "quint4x2",
    "quint2x4",
)

#: The dtype of each typed storage class.
STORAGES = {
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Int": "int32",
    "Long": "int64",
    "QInt32": "qint32",
    "QInt8": "qint8",
    "QUInt2x4": "quint2x4",
    "QUInt4x2": "quint4x2",
    "QUInt8": "quint8",
    "Short": "int16",
}

#: The width of an element, in bytes, of dtypes that storages may have but rankless does not read.
_OTHER_WIDTHS = {"complex128": 16, "qint8": 1, "qint32": 4, "quint2x4": 1, "quint4x2": 1, "quint8": 1}


def dtype_width(dtype: str) -> int:
    """Return the width in bytes of an element of a torch dtype."""
    return dtypes.dtype_width(BY_TORCH_NAME[dtype]) if dtype in BY_TORCH_NAME else _OTHER_WIDTHS[dtype]
