from .client.client import Client as Client
from .repository import KServeService as KServeService
from .repository import PackageKServe as PackageKServe
from .repository import PackageTriton as PackageTriton
from .repository import TritonRepository as TritonRepository
from .torchserve.artifact import TorchServeArchive as TorchServeArchive
from .torchserve.process import TorchServe as TorchServe
from .torchserve.stage import PackageTorchServe as PackageTorchServe
