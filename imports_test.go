package extevict_test

import (
	"go/build"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const module = "github.com/extevict/extevict"

// list runs go list and returns its lines.
func list(t *testing.T, args ...string) []string {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list"}, args...)...)
	cmd.Env = append(os.Environ(), "GOWORK=off") // of this module alone
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list %v: %v", args, err)
	}
	return strings.Fields(string(out))
}

// TestImports pins which way dependencies point.
func TestImports(t *testing.T) {
	const (
		controlPlane = "github.com/envoyproxy/go-control-plane/envoy"
		grpc         = "google.golang.org/grpc"
		protobuf     = "google.golang.org/protobuf"
	)
	for _, c := range []struct {
		pkg     string
		allowed []string // modules, and packages of ours, beside the standard library
	}{
		{"abort", nil},
		{"evictor", []string{module + "/abort"}},
		{"extproc", []string{module + "/abort", controlPlane, grpc, protobuf}},
		{"extproc/extproctest", []string{controlPlane, grpc, protobuf}},
		{"flowcontrol", []string{module + "/abort", module + "/evictor", module + "/internal/policy"}},
		{"internal/policy", nil},
		{"internal/labels", nil},
		{"internal/engine", nil},
		{"internal/envoy", nil},
	} {
		for _, imp := range list(t, "-f", `{{join .Imports "\n"}}`, "./"+c.pkg) {
			if p, err := build.Import(imp, "", build.FindOnly); err == nil && p.Goroot {
				continue
			}
			if !slices.ContainsFunc(c.allowed, func(a string) bool {
				return imp == a || !strings.HasPrefix(a, module) && strings.HasPrefix(imp, a+"/")
			}) {
				t.Errorf("%s imports %s", c.pkg, imp)
			}
		}
	}
}

// TestRequirements pins the main module's direct dependencies.
func TestRequirements(t *testing.T) {
	want := []string{
		"github.com/envoyproxy/go-control-plane/envoy",
		"github.com/google/go-cmp", // tests only
		"google.golang.org/grpc",
		"google.golang.org/protobuf",
	}
	got := list(t, "-m", "-f", "{{if not (or .Indirect .Main)}}{{.Path}}{{end}}", "all")
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("direct requirements (-want +got):\n%s", d)
	}
}
