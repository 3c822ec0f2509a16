// Package nvfm stands in for the bindings of NVIDIA's Fabric Manager library, which the Go module proxy does not serve. It
// has the names that the DRA driver is compiled against, and no library behind them: every call fails. The driver makes
// none unless its feature gate FabricManagerPartitioning is on, which it never is here.
package nvfm

// Return is what a call of the library returns.
type Return int

const (
	SUCCESS     Return = 0
	unavailable Return = -1
)

func (r Return) String() string {
	if r == SUCCESS {
		return "success"
	}
	return "the Fabric Manager library is not part of this build"
}

type (
	FabricPartitionId uint32

	PciDevice struct{}

	FabricPartitionGpuInfo struct {
		PhysicalId          uint32
		Uuid, PciBusId      [64]int8
		NumNvLinksAvailable uint32
		MaxNumNvLinks       uint32
		NvlinkLineRateMBps  uint32
	}

	FabricPartitionInfo struct {
		PartitionId FabricPartitionId
		IsActive    uint32
		NumGpus     uint32
		GpuInfo     [16]FabricPartitionGpuInfo
	}

	FabricPartitionList struct {
		NumPartitions uint32
		PartitionInfo [64]FabricPartitionInfo
	}
)

// Handle is a connection to a Fabric Manager.
type Handle interface {
	Disconnect() Return
	GetSupportedFabricPartitions() (FabricPartitionList, Return)
	ActivateFabricPartition(FabricPartitionId) Return
	DeactivateFabricPartition(FabricPartitionId) Return
}

// Interface is the library.
type Interface interface {
	Init() Return
	Shutdown() Return
	Connect(...ConnectOption) (Handle, Return)
}

type (
	LibraryOption func()
	ConnectOption func()
)

func WithLibraryPath(string) LibraryOption { return func() {} }
func WithUnixSocket(string) ConnectOption  { return func() {} }
func WithAddress(string) ConnectOption     { return func() {} }
func WithTimeoutMs(uint32) ConnectOption   { return func() {} }

// New gives the library.
func New(...LibraryOption) Interface { return library{} }

type library struct{}

func (library) Init() Return                              { return unavailable }
func (library) Shutdown() Return                          { return unavailable }
func (library) Connect(...ConnectOption) (Handle, Return) { return nil, unavailable }
