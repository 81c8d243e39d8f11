package envoy_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/extevict/extevict/internal/envoy"
)

// processes returns the processes that run in a directory, possibly removed, below dir.
func processes(t *testing.T, dir string) []int {
	t.Helper()
	links, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		t.Fatal(err)
	}
	var pids []int
	for _, link := range links {
		cwd, err := os.Readlink(link)
		if err == nil && strings.HasPrefix(cwd, dir+"/") {
			pid, _ := strconv.Atoi(strings.Split(link, "/")[2])
			pids = append(pids, pid)
		}
	}
	return pids
}

func TestClose(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	e := start(t, unreachable)
	ps := processes(t, dir)
	if len(ps) != 1 {
		t.Fatalf("processes %v, want one", ps)
	}
	for range 2 {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
		if err := syscall.Kill(ps[0], 0); err != syscall.ESRCH {
			t.Errorf("the process is still there, if only to be waited for: %v", err)
		}
		nothingLeft(t, dir)
	}
	if _, err := e.Stats(t.Context()); err == nil {
		t.Error("Stats of a closed Envoy succeeded")
	}
	if _, err := e.AccessLog(); err == nil {
		t.Error("AccessLog of a closed Envoy succeeded")
	}
}

// TestEndsByItself kills the process: whoever waits and whoever closes learns of it.
func TestEndsByItself(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	e, err := envoy.Start(t.Context(), find(t), unreachable)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(processes(t, dir)[0], syscall.SIGSEGV); err != nil {
		t.Fatal(err)
	}
	_, err = e.Await(t.Context(), func(envoy.Entry) bool { return false })
	check(t, err, "segmentation fault")
	check(t, e.Close(), "ended by itself: signal: segmentation fault")
	nothingLeft(t, dir)
}

// TestDiesWithParent kills a process that runs an Envoy.
func TestDiesWithParent(t *testing.T) {
	dir := t.TempDir()
	find(t)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "ENVOY_TEST_PARENT=1", "TMPDIR="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	cmd.Process.Kill()
	cmd.Wait()
	if err != nil || line != "started: <nil>\n" {
		t.Fatalf("the parent says %q, %v", line, err)
	}
	for range 500 {
		if len(processes(t, dir)) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	for _, pid := range processes(t, dir) {
		t.Errorf("process %d outlived its parent", pid)
		syscall.Kill(pid, syscall.SIGKILL)
	}
}

// TestSurvivesThread ends the thread on which Start was called. To the kernel a
// thread is a parent.
func TestSurvivesThread(t *testing.T) {
	bin := find(t)
	var e *envoy.Envoy
	var err error
	thread := <-onThread(func() { e, err = envoy.Start(t.Context(), bin, unreachable) })
	if err != nil {
		t.Fatal(err)
	}
	task := fmt.Sprintf("/proc/self/task/%d", thread)
	for range 500 {
		if _, err := os.Stat(task); err != nil {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	if _, err := os.Stat(task); err == nil {
		t.Fatal("the thread does not end")
	}
	time.Sleep(50 * time.Millisecond) // for an Envoy that was killed to be reaped
	if err := e.Close(); err != nil {
		t.Error(err)
	}
}

// onThread runs f on a thread that ends afterwards, and sends that thread's id.
func onThread(f func()) <-chan int {
	thread := make(chan int, 1)
	go func() {
		runtime.LockOSThread()
		if syscall.Gettid() == os.Getpid() { // the main thread can't end, so try another
			defer runtime.UnlockOSThread()
			thread <- <-onThread(f)
			return
		}
		f()
		thread <- syscall.Gettid()
	}()
	return thread
}
