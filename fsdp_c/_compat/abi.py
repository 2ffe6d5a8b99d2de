"""Reads sizes of torch's C++ classes from the loaded libraries of torch.

The extension derives from these classes, calls their virtual functions and reads their members. So
the loaded torch must have classes of the same sizes as the torch of the build. The build stores the
sizes in ``_C.json``, and the import compares them (``build_info.py``). Builds of torch from source,
and prereleases, may differ from the release with the same version.

A library's symbol table has the sizes of its objects. A virtual table has one entry for
each virtual function of a class. The size of the undefined tensor is that of ``c10::TensorImpl``.
The build imports this file alone, so it imports nothing of the package.
"""

from __future__ import annotations

import ctypes

import torch

SYMBOLS = {
    "libc10.so": {
        "c10::TensorImpl": "_ZN3c1019UndefinedTensorImpl10_singletonE",
        "vtable of c10::TensorImpl": "_ZTVN3c1010TensorImplE",
        "vtable of c10::StorageImpl": "_ZTVN3c1011StorageImplE",
        "vtable of c10::Allocator": "_ZTVN3c109AllocatorE",
    },
    "libtorch_cpu.so": {
        "vtable of torch::autograd::Node": "_ZTVN5torch8autograd4NodeE",
        "vtable of torch::autograd::AutogradMeta": "_ZTVN5torch8autograd12AutogradMetaE",
        "vtable of c10d::Work": "_ZTVN4c10d4WorkE",
        "vtable of c10d::Backend": "_ZTVN4c10d7BackendE",
        "vtable of c10d::ProcessGroup": "_ZTVN4c10d12ProcessGroupE",
    },
}
"""Maps libraries to the names of sizes and their symbols."""

DT_NULL, DT_SYMTAB, DT_STRTAB, DT_GNU_HASH = 0, 6, 5, 0x6FFFFEF5


class _LinkMap(ctypes.Structure):
    """The start of glibc's ``struct link_map``, to which a handle of ``dlopen`` points."""

    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


class _Symbol(ctypes.Structure):
    """``Elf64_Sym``."""

    _fields_ = (
        ("name", ctypes.c_uint32),
        ("info", ctypes.c_uint8),
        ("other", ctypes.c_uint8),
        ("section", ctypes.c_uint16),
        ("value", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
    )


def _hash_name(name: bytes) -> int:
    value = 5381
    for byte in name:
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


class _SymbolTable:
    """The dynamic symbols of a loaded library, found through its GNU hash table."""

    def __init__(self, library: ctypes.CDLL) -> None:
        tags: dict[int, int] = {}
        address = _LinkMap.from_address(library._handle).dynamic
        while (entry := (ctypes.c_uint64 * 2).from_address(address))[0] != DT_NULL:
            tags[entry[0]] = entry[1]
            address += ctypes.sizeof(entry)
        self.symbols, self.strings = tags[DT_SYMTAB], tags[DT_STRTAB]
        table = tags[DT_GNU_HASH]
        header = (ctypes.c_uint32 * 4).from_address(table)
        self.bucket_count, self.first_symbol, bloom_words, _ = header
        self.buckets = table + ctypes.sizeof(header) + 8 * bloom_words  # after the Bloom filter
        self.chain = self.buckets + 4 * self.bucket_count

    def find_size(self, name: bytes) -> int:
        """Returns the size of a symbol in bytes; 0 if the library does not define it."""
        wanted = _hash_name(name)
        bucket = self.buckets + 4 * (wanted % self.bucket_count)
        index = ctypes.c_uint32.from_address(bucket).value
        while index >= self.first_symbol:
            value = ctypes.c_uint32.from_address(self.chain + 4 * (index - self.first_symbol)).value
            if value | 1 == wanted | 1:
                symbol = _Symbol.from_address(self.symbols + ctypes.sizeof(_Symbol) * index)
                if ctypes.string_at(self.strings + symbol.name) == name:
                    return int(symbol.size)
            if value & 1:  # the last of its bucket
                break
            index += 1
        return 0


def read_sizes() -> dict[str, int]:
    """Returns sizes in bytes by name, without those that the libraries of this torch lack."""
    sizes = {"torch._C.TensorBase": torch._C.TensorBase.__basicsize__}
    for library, symbols in SYMBOLS.items():
        try:
            table = _SymbolTable(ctypes.CDLL(library))
        except (OSError, KeyError):  # a torch with other libraries, or linked without a hash table
            continue
        found = {name: table.find_size(symbol.encode()) for name, symbol in symbols.items()}
        sizes.update((name, size) for name, size in found.items() if size)
    return sizes
