// Command scenes measures the policy of package flowcontrol in the scenes of its specification, by
// replaying the public traces whose slices are in internal/sim/testdata: the full ones, from a folder.
//
//	go run ./internal/sim/scenes -traces DIR [-seeds 3] [-scene S2,S3] [-without]
//
// It first compares the simulator with the prototype that the targets come of. Then it prints a table
// of policies for each scene, and a line for each target: what must be reached, what is the goal, what
// came out. Its exit code is 1 if a must is missed. -without switches off one part of the policy at a
// time instead.
package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"github.com/extevict/extevict/internal/sim"
)

func main() {
	dir := flag.String("traces", "", "folder of the full traces: "+strings.Join(files[:], ", "))
	seeds := flag.Int("seeds", 3, "runs of each scene and policy; results are their means")
	only := flag.String("scene", "", "scenes to run, separated by commas; all, and the calibration, if empty")
	without := flag.Bool("without", false, "run S2 and S3 with one part of the policy left out at a time, and nothing else")
	workers := flag.Int("workers", 2, "runs at a time")
	flag.Parse()
	if *dir == "" || *seeds < 1 || *workers < 1 || flag.NArg() > 0 {
		fmt.Fprintln(os.Stderr, "scenes: -traces DIR must name the folder of the full traces (internal/sim/testdata/README.md says where they are from), and -seeds and -workers must be at least 1")
		os.Exit(2)
	}
	t, err := load(*dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, "scenes:", err)
		os.Exit(2)
	}
	debug.SetGCPercent(400) // memory is not what is short
	start := time.Now()
	ok := true
	p := &pool{slots: make(chan struct{}, *workers)}
	switch {
	case *without:
		ablate(p, t, *seeds)
	default:
		want := map[string]bool{}
		for name := range strings.SplitSeq(*only, ",") {
			want[name] = true
		}
		var all []scene
		for _, s := range append([]scene{units()}, t.scenes()...) {
			if *only == "" || want[s.name] {
				all = append(all, s)
			}
		}
		if len(all) == 0 {
			fmt.Fprintf(os.Stderr, "scenes: no scene %q\n", *only)
			os.Exit(2)
		}
		if *only == "" {
			ok = calibrate(p, t)
		}
		ok = measure(p, all, *seeds) && ok
	}
	fmt.Printf("\n%d seeds, %.0f s\n", *seeds, time.Since(start).Seconds())
	if !ok {
		os.Exit(1)
	}
}

// files are the traces, as they are called where they come from.
var files = [...]string{"AzureLLMInferenceTrace_code.csv", "AzureLLMInferenceTrace_conv.csv", "mooncake_conversation_trace.jsonl"}

type traces struct{ code, conv, moon []sim.Record }

func load(dir string) (traces, error) {
	var rs [len(files)][]sim.Record
	for i, name := range files {
		f, err := os.Open(filepath.Join(dir, name))
		if err != nil {
			return traces{}, err
		}
		rs[i], err = sim.ReadTrace(f)
		f.Close()
		if err != nil {
			return traces{}, fmt.Errorf("%s: %w", name, err)
		}
	}
	return traces{rs[0], rs[1], rs[2]}, nil
}
