from .client.client import Client as Client
from .repository.kserve import KServeService as KServeService
from .repository.kserve import PackageKServe as PackageKServe
from .repository.triton import PackageTriton as PackageTriton
from .repository.triton import TritonRepository as TritonRepository
from .torchserve.artifact import TorchServeArchive as TorchServeArchive
from .torchserve.process import TorchServe as TorchServe
from .torchserve.stage import PackageTorchServe as PackageTorchServe
