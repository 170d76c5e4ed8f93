"""The functions of the stages that package: `compress.package_torchserve` and its like."""

from compress.functional.stage_function import stage_function
from compress.serve.repository import PackageKServe, PackageTriton
from compress.serve.torchserve.stage import PackageTorchServe

package_torchserve = stage_function(PackageTorchServe)
package_triton = stage_function(PackageTriton)
package_kserve = stage_function(PackageKServe)
