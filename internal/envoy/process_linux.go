package envoy

import "syscall"

// dieWithParent makes the kernel kill the child when the thread that starts it ends,
// so that a killed test leaves nothing behind. The caller must keep that thread.
func dieWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
