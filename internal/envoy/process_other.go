//go:build !linux

package envoy

import "syscall"

// dieWithParent is nil where the kernel has no such thing: there only Close ends an
// Envoy.
func dieWithParent() *syscall.SysProcAttr { return nil }
