package vllm

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	readyTimeout = 4 * time.Minute  // bounds Start. Nearly all of it is Python's imports
	stopTimeout  = 20 * time.Second // bounds how long vLLM may take to end when asked to
)

// Model is the name under which the engine serves its model.
const Model = "m"

//go:embed testdata/model
var model embed.FS

// BlockTokens is the size of a block of the KV cache in tokens.
const BlockTokens = 32

// A Config is what the engine's capacity depends on. All fields are positive.
type Config struct {
	Blocks     int // of the KV cache
	MaxSeqs    int // requests that run at once
	StepTokens int // that one step computes at most: it bounds a step's length
}

// Find returns the path of a Python with vLLM: what the environment variable
// VLLM_PYTHON names.
func Find() (string, error) {
	const how = "\"make e2e-engine\" installs it and sets VLLM_PYTHON"
	name := os.Getenv("VLLM_PYTHON")
	if name == "" {
		return "", errors.New("vllm: VLLM_PYTHON is not set (" + how + ")")
	}
	path, err := exec.LookPath(name)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		return "", fmt.Errorf("vllm: no Python: VLLM_PYTHON: %w (%s)", err, how)
	}
	return path, nil
}

// An Engine is a running vLLM. Its methods may be called concurrently.
type Engine struct {
	dir  string // its working directory, which holds the model and the log
	addr string

	process *os.Process   // nil if it could not be started
	exited  chan struct{} // closed by run
	state   string        // how the process ended; set before exited is closed

	close func() error
}

// Start runs vLLM with the Python at path and waits until it is healthy, four minutes
// at most. ctx bounds Start and not what it started: that runs until Close. If Start
// fails it leaves nothing behind; the error wraps ctx's cause if that was why, and
// carries the end of the log. If this process dies without a Close, the engine is
// interrupted by the kernel; its directory stays.
func Start(ctx context.Context, python string, c Config) (*Engine, error) {
	if c.Blocks <= 0 || c.MaxSeqs <= 0 || c.StepTokens <= 0 {
		return nil, fmt.Errorf("vllm: %+v: all must be positive", c)
	}
	dir, err := os.MkdirTemp("", "extevict-vllm-")
	if err != nil {
		return nil, fmt.Errorf("vllm: %w", err)
	}
	e := &Engine{dir: dir, exited: make(chan struct{})}
	e.close = sync.OnceValue(e.stop)
	if err := e.start(ctx, python, c); err != nil {
		err = fmt.Errorf("vllm: not started: %w%s", err, e.logTail())
		e.Close()
		return nil, err
	}
	return e, nil
}

func (e *Engine) start(ctx context.Context, python string, c Config) error {
	if err := os.CopyFS(e.dir, model); err != nil {
		return err
	}
	port, err := freePort()
	if err != nil {
		return err
	}
	e.addr = net.JoinHostPort("127.0.0.1", port)
	log, err := os.Create(e.log())
	if err != nil {
		return err
	}
	defer log.Close()
	// In a module, since the wheel's command vllm wants metadata of another wheel.
	cmd := exec.Command(python, "-m", "vllm.entrypoints.openai.api_server",
		"--model", filepath.Join(e.dir, "testdata", "model"), "--served-model-name", Model,
		"--host", "127.0.0.1", "--port", port,
		"--load-format", "dummy", "--dtype", "bfloat16", "--enforce-eager",
		"--max-model-len", "4608",
		"--block-size", strconv.Itoa(BlockTokens),
		"--num-gpu-blocks-override", strconv.Itoa(c.Blocks),
		"--max-num-seqs", strconv.Itoa(c.MaxSeqs),
		"--max-num-batched-tokens", strconv.Itoa(c.StepTokens),
		// Without these two a worker process of its own competes with the engine's
		// busy loop for the processors, and all streams stall for seconds.
		"--distributed-executor-backend", "uni")
	cmd.Env = append(os.Environ(), "VLLM_ENABLE_V1_MULTIPROCESSING=0",
		"HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1", "VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1",
		"VLLM_CPU_KVCACHE_SPACE=1", // GiB that are reserved, whatever Blocks is
		"VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1",
		"VLLM_HOST_IP=127.0.0.1") // else it finds out the machine's own
	cmd.Dir = e.dir
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGINT}

	started := make(chan error)
	go e.run(cmd, started)
	if err := <-started; err != nil {
		return err
	}
	e.process = cmd.Process
	return e.awaitHealth(ctx)
}

// run starts cmd, reports on started, and waits until the process has ended. It is the
// one goroutine of an Engine and keeps its thread all that time, since the kernel takes
// the thread that started a process for its parent.
func (e *Engine) run(cmd *exec.Cmd, started chan<- error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := cmd.Start()
	started <- err
	if err != nil {
		return
	}
	cmd.Wait()
	e.state = cmd.ProcessState.String()
	close(e.exited)
}

func (e *Engine) awaitHealth(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, readyTimeout, fmt.Errorf("not healthy after %v", readyTimeout))
	defer cancel()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		_, err := e.get(ctx, "/health")
		if err == nil {
			return nil
		}
		select {
		case <-e.exited:
			return errors.New(e.state)
		case <-ctx.Done():
			return fmt.Errorf("%w (%v)", context.Cause(ctx), err)
		case <-tick.C:
		}
	}
}

// freePort returns a port that nobody had a moment ago: vLLM does not tell which one it
// chose.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

// Address returns where the engine serves, as ip:port.
func (e *Engine) Address() string { return e.addr }

// Metrics returns what the engine's /metrics say, in Prometheus' text format. It costs
// the engine about 10 ms.
func (e *Engine) Metrics(ctx context.Context) (string, error) {
	b, err := e.get(ctx, "/metrics")
	if err != nil {
		return "", fmt.Errorf("vllm: %w", err)
	}
	return string(b), nil
}

// Close ends the engine with all of its processes and removes its files. It fails if
// the engine had ended before, with the end of its log, or if a file stays. Further
// calls return what the first did.
func (e *Engine) Close() error { return e.close() }

func (e *Engine) stop() error {
	var died error
	if e.process != nil {
		select {
		case <-e.exited:
			died = fmt.Errorf("vllm: ended by itself: %s%s", e.state, e.logTail())
		default:
			e.process.Signal(os.Interrupt) // it ends its children
		}
		late := time.NewTimer(stopTimeout)
		defer late.Stop()
		select {
		case <-e.exited:
		case <-late.C:
		}
		syscall.Kill(-e.process.Pid, syscall.SIGKILL) // what is left of its group, if anything is
		<-e.exited
	}
	if err := os.RemoveAll(e.dir); err != nil {
		return errors.Join(died, fmt.Errorf("vllm: %w", err))
	}
	return died
}

// client keeps no connection, and so no goroutine, after a call.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func (e *Engine) get(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+e.addr+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", path, resp.Status)
	}
	return b, nil
}

func (e *Engine) log() string { return filepath.Join(e.dir, "vllm.log") }

// logTail returns the end of the log as an appendix to an error, or "".
func (e *Engine) logTail() string {
	b, err := os.ReadFile(e.log())
	if err != nil || len(b) == 0 {
		return ""
	}
	return "; its log ends:\n" + string(b[max(0, len(b)-4096):])
}
